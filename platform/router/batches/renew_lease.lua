-- Renews a lease, or with 0 milliseconds gives it up. Returns 1, or 0 where it is not held any more.
--
-- KEYS: lease. ARGV: its value, milliseconds.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
