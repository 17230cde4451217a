-- Writes a file's record. Returns 1; 0 where the tenant would have too many bytes or files: then nothing is written.
--
-- KEYS: records (hash), sizes (hash). ARGV: file id, record, bytes, most bytes of all files (-1: any), most files.

local quota, size = tonumber(ARGV[4]), tonumber(ARGV[3])
if quota >= 0 then
  local held = 0
  for _, other in ipairs(redis.call('HVALS', KEYS[2])) do held = held + tonumber(other) end
  held = held - tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
  if held + size > quota then return 0 end
  if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return 0 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
