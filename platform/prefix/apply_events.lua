-- Applies block events to the copy of a replica's cache. Returns 1; 0 where Redis does not hold the copy as of the
-- event before, so that it must be written anew.
--
-- KEYS: blocks (set of block keys), meta (hash: seq, count, replica). ARGV: event_seq of the copy, event_seq of the events,
-- stored and removed block keys (each list one string), lease in ms, bytes to a key, keys to a command.

local blocks, meta = KEYS[1], KEYS[2]
local expected_seq, event_seq, stored, removed = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease_ms, key_bytes, chunk = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])

local copy = redis.call('HMGET', meta, 'seq', 'count')
if copy[1] ~= expected_seq or tonumber(copy[2]) ~= redis.call('SCARD', blocks) then return 0 end

local function call_in_chunks(command, packed)
  for first = 1, #packed, key_bytes * chunk do
    local keys = {}
    for at = first, math.min(#packed, first + key_bytes * chunk - 1), key_bytes do
      keys[#keys + 1] = string.sub(packed, at, at + key_bytes - 1)
    end
    redis.call(command, blocks, unpack(keys))
  end
end
call_in_chunks('SREM', removed)
call_in_chunks('SADD', stored)
redis.call('HSET', meta, 'seq', event_seq, 'count', redis.call('SCARD', blocks))
redis.call('PEXPIRE', blocks, lease_ms)
redis.call('PEXPIRE', meta, lease_ms)
return 1
