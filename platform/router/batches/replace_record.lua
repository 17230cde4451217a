-- Replaces a batch's record, if it still is what it was when it was read. Returns 1, or 0.
--
-- KEYS: records (hash). ARGV: batch id, record as it was, record as it is to be.

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
