-- Says that the copy of a replica's cache is whole, as of an event, and begins its lease.
--
-- KEYS: blocks (set of block keys), meta (hash: seq, count, replica). ARGV: event_seq, number of blocks, replica's id, lease in
-- ms.

local blocks, meta = KEYS[1], KEYS[2]
redis.call('HSET', meta, 'seq', ARGV[1], 'count', ARGV[2], 'replica', ARGV[3])
redis.call('PEXPIRE', meta, ARGV[4])
redis.call('PEXPIRE', blocks, ARGV[4])
return 1
