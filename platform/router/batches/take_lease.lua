-- Takes a batch that nobody holds. Returns the number of this taking, from 1; 0 where somebody holds it.
--
-- KEYS: lease, counts (hash). ARGV: who takes it, milliseconds until the lease ends by itself.

if redis.call('GET', KEYS[1]) then return 0 end
local epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. epoch, 'PX', ARGV[2])
return epoch
