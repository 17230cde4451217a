-- Notes that a line is done, and what it has used: once, whoever repeats it, and only under the lease. Returns 1; 0 where
-- the line was done before, -1 where the lease is not held any more; but 0 where it was done under this taking, whose
-- usage is counted, also without the lease.
--
-- KEYS: lease, marks (string: 4 bytes a line, the number of the taking under which it was done, 0: not done), counts
-- (hash), sizes of the tenant's files (hash), the tenant's usage of the day (hash). ARGV: the lease's value, number of
-- the taking, number of the line from 0, `completed` or `failed`, batch id, bytes of the result, seconds that usage is
-- kept, then for each kind of usage its field of the day, its name, and how much.

local at = 4 * tonumber(ARGV[3])
local mark = redis.call('GETRANGE', KEYS[2], at, at + 3)
local epoch = tonumber(ARGV[2])
local bytes = {}
for place = 4, 1, -1 do
  bytes[place] = string.char(epoch % 256)
  epoch = math.floor(epoch / 256)
end
local own = table.concat(bytes)
if mark == own then return 0 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
if mark ~= '' and mark ~= '\0\0\0\0' then return 0 end
redis.call('SETRANGE', KEYS[2], at, own)
redis.call('HINCRBY', KEYS[3], ARGV[4], 1)
redis.call('HINCRBY', KEYS[4], ARGV[5], ARGV[6])
for place = 8, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[5], ARGV[place], ARGV[place + 2])
  redis.call('HINCRBY', KEYS[3], ARGV[place + 1], ARGV[place + 2])
end
if #ARGV > 7 then redis.call('EXPIRE', KEYS[5], ARGV[7]) end
return 1
