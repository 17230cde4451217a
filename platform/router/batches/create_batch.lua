-- Writes a new batch. Returns 1; 0 where the tenant would have too many lines waiting, -1 where it has too many batches,
-- -2 where it has too many files, to which the results would be added.
--
-- KEYS: records (hash), lines of batches that have not ended (hash), records of files (hash). ARGV: batch id, record,
-- lines, most lines, most batches, most files.

local waiting = 0
for _, lines in ipairs(redis.call('HVALS', KEYS[2])) do waiting = waiting + tonumber(lines) end
if waiting + tonumber(ARGV[3]) > tonumber(ARGV[4]) then return 0 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return -1 end
if redis.call('HLEN', KEYS[3]) >= tonumber(ARGV[6]) then return -2 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
