{{/* Redis' user of each role and its ACL rules, generated from penstock.base.redis_roles by `python -m deploy.chart_redis_roles`; use fromJson. */}}

{{- define "penstock.redisRoles" -}}
{
 "gateway": {
  "user": "penstock-gateway",
  "rules": "resetkeys ~penstock:* -@all +get +set +getdel +getrange +setrange +expire +pexpire +hget +hset +hsetnx +hdel +hexists +hincrby +hgetall +hmget +hlen +hvals +sadd +smembers +zadd +zrem +zcard +zrangebyscore +zremrangebyscore +rpush +blpop +time +multi +exec +evalsha +script|load +ping +select +client|setname +cluster|slots +cluster|shards +cluster|nodes +command +readonly"
 },
 "replica": {
  "user": "penstock-replica",
  "rules": "resetkeys ~penstock:prefix:* -@all +del +sadd +srem +scard +hset +hmget +pexpire +multi +exec +evalsha +script|load +ping +select +client|setname +cluster|slots +cluster|shards +cluster|nodes +command +readonly"
 },
 "autoscaler": {
  "user": "penstock-autoscaler",
  "rules": "resetkeys ~penstock:scaling:* ~penstock:hand:* -@all +get +set +smembers +srem +rpush +ltrim +pexpire +blpop +multi +exec +ping +select +client|setname +cluster|slots +cluster|shards +cluster|nodes +command +readonly"
 },
 "operator": {
  "user": "penstock-operator",
  "rules": "resetkeys ~penstock:* -@all +@read +@write +@transaction +@connection +evalsha +script|load -@dangerous +info +ping +select +client|setname +cluster|slots +cluster|shards +cluster|nodes +command +readonly"
 }
}
{{- end }}
