-- Registers an adapter under a tenant's name for it, or replaces what was registered. Returns the record; false where
-- the tenant has as many adapters as it may. The same files for the same base model again change nothing.
--
-- KEYS: records (hash: name -> record), versions (hash: name -> number). ARGV: name, adapter as JSON, digests of its files
-- and of its base model as `digest/base`, most adapters of a tenant. A record is `version digest/base JSON`.

local records, versions = KEYS[1], KEYS[2]
local name, adapter, identity, max_adapters = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local old = redis.call('HGET', records, name)
if old then
  local space = string.find(old, ' ')
  if string.sub(old, space + 1, space + #identity) == identity then return old end
elseif redis.call('HLEN', records) >= max_adapters then
  return false
end
local record = redis.call('HINCRBY', versions, name, 1) .. ' ' .. identity .. ' ' .. adapter
redis.call('HSET', records, name, record)
return record
