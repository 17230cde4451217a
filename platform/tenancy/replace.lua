-- Replaces a value if it is still what the caller read. Returns 1; 0 where somebody else was faster.
--
-- KEYS: the value. ARGV: what was read (empty: nothing was there), what it becomes.

local found = redis.call('GET', KEYS[1])
if (found or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
