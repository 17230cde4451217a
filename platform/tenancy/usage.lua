-- Adds one batch of a gateway to the usage of a tenant on one day. Returns 1; 0 where the batch was added before.
--
-- KEYS: counts (hash), number of the gateway's last batch. ARGV: number of this batch, seconds that the counts are kept,
-- seconds that the number is kept, then fields and counts in turn.

local last = redis.call('GET', KEYS[2])
if last and tonumber(last) >= tonumber(ARGV[1]) then return 0 end
for at = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[at], ARGV[at + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return 1
