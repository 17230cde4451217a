-- Registers a gateway for the length of its lease and returns how many gateways are registered.
--
-- KEYS: gateways (sorted set: gateway id by the time of its last registration, Unix ms). ARGV: gateway id, lease in ms.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
