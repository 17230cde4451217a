-- Applies one LimitRequest to the ledger of one tenant: does what `window.LimitLedger.apply` does, on Redis's clock.
--
-- KEYS: requests, tokens (hashes: bucket -> count), held (hash: request id -> bucket:tokens, unless it has one sequence
-- bucket:tokens:sequences), leases (sorted set: request id by the end of its lease), then those of budgets.lua, which
-- stands before this. ARGV: the LimitRequest as JSON; bucket_ms, num_buckets, lease_ms of the Window; how long a request
-- should wait for what running requests hold, in ms.
-- Returns the fields of a Verdict: is_admitted (0 or 1), the limit that refused (0: none, else its place in LIMIT_NAMES,
-- from 1), wait_ms (-1: it can never fit), requests, tokens, reset_requests_ms, reset_tokens_ms, parallel, spent_nano and
-- aside_nano as text.

local requests, tokens, held, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local request = cjson.decode(ARGV[1])
local bucket_ms, num_buckets, lease_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local parallel_wait_ms = tonumber(ARGV[5])
local now = request.now_ms
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local current = math.floor(now / bucket_ms)
local oldest = current - num_buckets

local owing = request.budget
local budget = owing and open_budget({KEYS[5], KEYS[6], KEYS[7]}, now, lease_ms)

-- When all of a bucket is older than the window, as ms from now.
local function leaves_in(bucket)
  return (bucket + num_buckets + 1) * bucket_ms - now
end

local function release(id)
  redis.call('HDEL', held, id)
  redis.call('ZREM', leases, id)
end

-- usage: the fields of an UnsettledUsage.
local function charge(usage, bucket)
  local id, num_requests, num_tokens, is_running = usage[1], usage[3], usage[4], usage[5]
  local num_sequences = usage[6] or 1
  if redis.call('HEXISTS', held, id) == 1 then return end
  if bucket >= oldest then
    redis.call('HINCRBY', requests, bucket, num_requests)
    redis.call('HINCRBY', tokens, bucket, num_tokens)
  end
  if is_running then
    local hold = string.format('%d:%d', bucket, num_tokens)
    if num_sequences ~= 1 then hold = string.format('%s:%d', hold, num_sequences) end
    redis.call('HSET', held, id, hold)
    redis.call('ZADD', leases, now + lease_ms, id)
  end
end

local function settle(id, used_tokens)
  local hold = redis.call('HGET', held, id)
  if not hold then return end
  release(id)
  local bucket, reserved = string.match(hold, '^(%d+):(%d+)')
  if redis.call('HEXISTS', tokens, bucket) == 1 then
    redis.call('HINCRBY', tokens, bucket, used_tokens - tonumber(reserved))
  end
end

-- Sum of a hash of buckets, ms until nothing of it counts, and its buckets as {bucket, count}; drops those that are over.
local function sum_buckets(name)
  local flat, sum, reset, kept, gone = redis.call('HGETALL', name), 0, 0, {}, {}
  for at = 1, #flat, 2 do
    local bucket, count = tonumber(flat[at]), tonumber(flat[at + 1])
    if bucket < oldest then
      gone[#gone + 1] = flat[at]
    else
      sum = sum + count
      kept[#kept + 1] = {bucket, count}
      if count > 0 then reset = math.max(reset, leaves_in(bucket)) end
    end
  end
  if #gone > 0 then redis.call('HDEL', name, unpack(gone)) end
  return sum, reset, kept
end

-- Ms until so much has left the window; math.huge: that much is not in it.
local function wait_for(excess, kept)
  table.sort(kept, function(one, other) return one[1] < other[1] end)
  for _, pair in ipairs(kept) do
    excess = excess - pair[2]
    if excess <= 0 then return leaves_in(pair[1]) end
  end
  return math.huge
end

-- Sequences under way.
local function count_sequences()
  local count = 0
  for _, hold in ipairs(redis.call('HVALS', held)) do
    count = count + (tonumber(string.match(hold, '^%d+:%d+:(%d+)$')) or 1)
  end
  return count
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do release(id) end
for _, settled in ipairs(request.settled or {}) do settle(settled[1], settled[2]) end
for _, usage in ipairs(request.unsettled or {}) do charge(usage, math.floor((now - usage[2]) / bucket_ms)) end
for _, id in ipairs(request.renewed or {}) do
  redis.call('HSETNX', held, id, '0:0')
  redis.call('ZADD', leases, now + lease_ms, id)
end
if budget then budget.report(owing) end

local sum_requests, reset_requests, kept_requests = sum_buckets(requests)
local sum_tokens, reset_tokens, kept_tokens = sum_buckets(tokens)
local max_parallel = (request.limits or {}).max_parallel
local parallel = max_parallel and count_sequences() or 0
local is_admitted, limit, wait = 0, 0, 0

-- The limit that is in the way for longest is the one to report.
local function refuse(number, wait_ms)
  if wait_ms > wait or limit == 0 then limit, wait = number, wait_ms end
end

if request.id and redis.call('HEXISTS', held, request.id) == 1 then
  is_admitted = 1
elseif request.id then
  local limits, wanted, sequences = request.limits or {}, request.tokens or 0, request.sequences or 1
  local max_requests, max_tokens = limits.requests_per_minute, limits.tokens_per_minute
  if max_requests and sum_requests + 1 > max_requests then
    refuse(1, wait_for(sum_requests + 1 - max_requests, kept_requests))
  end
  if max_tokens and sum_tokens + wanted > max_tokens then
    refuse(2, wait_for(sum_tokens + wanted - max_tokens, kept_tokens))
  end
  if max_parallel and parallel + sequences > max_parallel then refuse(3, parallel_wait_ms) end
  if owing and owing.limit then
    local wait_ms = budget.wait_for(request.id, owing.nano or 0, owing.limit, parallel_wait_ms)
    if wait_ms then refuse(4, wait_ms) end
  end
  if limit == 0 then
    charge({request.id, 0, 1, wanted, true, sequences}, current)
    if owing and owing.limit then budget.reserve(request.id, owing.nano or 0, owing.is_full) end
    is_admitted = 1
    if max_parallel then parallel = parallel + sequences end
    sum_requests, sum_tokens = sum_requests + 1, sum_tokens + wanted
    reset_requests = math.max(reset_requests, leaves_in(current))
    if wanted > 0 then reset_tokens = math.max(reset_tokens, leaves_in(current)) end
  end
end

local window = (num_buckets + 2) * bucket_ms
redis.call('PEXPIRE', requests, window)
redis.call('PEXPIRE', tokens, window)
redis.call('PEXPIRE', held, math.max(window, lease_ms))
redis.call('PEXPIRE', leases, math.max(window, lease_ms))
if wait == math.huge then wait = -1 end
local spent, aside = '0', '0'
if budget then spent, aside = budget.close(owing) end
return {
  is_admitted, limit, wait, sum_requests, sum_tokens, reset_requests, reset_tokens, parallel, spent, aside
}
