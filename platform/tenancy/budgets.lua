-- The ledger of one budget, of charges in a calendar month (UTC): functions that limits.lua uses, which comes behind this.
--
-- Amounts are whole numbers of 1e-9 of the currency's unit. Each is below 2^53, so that Lua's doubles hold it; sums are
-- Redis' own 64-bit integers, and are read as text. Keys: spent (hash: month such as 2026-11 -> charged or reserved,
-- month:open -> the part that is reserved and not charged yet, seen -> time of the last call, ms), owed (hash: id ->
-- month:counted:charged:state), owed_leases (sorted set: id by the end of its lease). States: h held, e held once more
-- (see end_owed_leases), o over: its lease ended, and it is remembered for a late settlement. H and E: as h and e, but
-- at the end of the lease all of it stays charged.

local DAY_MS = 86400000
local SPENT_KEPT_MS = 62 * DAY_MS
local OVER_KEPT_MS = 3600000
-- What a gateway has set aside is held for as many leases of a request; charges.py relies on the same number.
local ASIDE_LEASES = 4
local MONTH_DAYS = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}

-- Days from 1970-01-01 to the first of a year.
local function first_day(year)
  local before = year - 1
  return 365 * (year - 1970) + math.floor(before / 4) - math.floor(before / 100) + math.floor(before / 400) - 477
end

-- The month that holds a time, as text; when the next one begins, in ms; and the month before it.
local function month_of(ms)
  local days = math.floor(ms / DAY_MS)
  local year = 1970 + math.floor(days / 366)
  while first_day(year + 1) <= days do year = year + 1 end
  local next_first, month = first_day(year), 0
  repeat
    month = month + 1
    next_first = next_first + MONTH_DAYS[month]
    if month == 2 and first_day(year + 1) - first_day(year) == 366 then next_first = next_first + 1 end
  until days < next_first
  local before = month > 1 and {year, month - 1} or {year - 1, 12}
  return string.format('%d-%02d', year, month), next_first * DAY_MS, string.format('%d-%02d', unpack(before))
end

-- Sum of a minuend and a negative of a subtrahend, both as text; exact where it is below 2^53.
local function difference(minuend, subtrahend)
  local function parts(text)
    if string.sub(text, 1, 1) == '-' then return 0, 0 end
    return tonumber(string.sub(text, 1, -10)) or 0, tonumber(string.sub(text, -9))
  end
  local high, low = parts(minuend)
  local other_high, other_low = parts(subtrahend)
  return (high - other_high) * 1e9 + (low - other_low)
end

-- keys: spent, owed, owed_leases. now, lease_ms: ms.
local function open_budget(keys, now, lease_ms)
  local spent, owed, leases = keys[1], keys[2], keys[3]
  local month, next_month, month_before = month_of(now)
  local budget = {}

  local function add(field, nano)
    if nano ~= 0 then redis.call('HINCRBY', spent, field, string.format('%.0f', nano)) end
  end

  local function find(id)
    local text = redis.call('HGET', owed, id)
    if not text then return nil end
    local in_month, counted, charged, state = string.match(text, '^([%d-]+):(%d+):(%d+):(%a)$')
    return {month = in_month, counted = tonumber(counted), charged = tonumber(charged), state = state}
  end

  local function open_part(entry)
    return (not entry or entry.state == 'o') and 0 or entry.counted - entry.charged
  end

  -- Replaces an entry by another of the same month; nil: there is none.
  local function put(id, before, after, lease_until)
    local in_month = (before or after).month
    add(in_month, (after and after.counted or 0) - (before and before.counted or 0))
    add(in_month .. ':open', open_part(after) - open_part(before))
    if after then
      redis.call(
        'HSET', owed, id, string.format('%s:%.0f:%.0f:%s', in_month, after.counted, after.charged, after.state)
      )
      redis.call('ZADD', leases, lease_until, id)
    else
      redis.call('HDEL', owed, id)
      redis.call('ZREM', leases, id)
    end
  end

  local function held(in_month, counted, charged, is_full)
    return {month = in_month, counted = counted, charged = math.min(charged, counted), state = is_full and 'H' or 'h'}
  end

  local function over(in_month, charged)
    return {month = in_month, counted = charged, charged = charged, state = 'o'}
  end

  -- Gives back what dead gateways have reserved. Where nobody has called for a part of a lease, Redis itself may have
  -- been away, and no lease could be renewed: then each gets one more.
  local function end_owed_leases()
    local seen = tonumber(redis.call('HGET', spent, 'seen'))
    local was_quiet = seen ~= nil and now - seen > lease_ms / 3
    redis.call('HSET', spent, 'seen', string.format('%.0f', now))
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
      local entry = find(id)
      if not entry then
        redis.call('ZREM', leases, id)
      elseif entry.state == 'o' then
        redis.call('HDEL', owed, id)
        redis.call('ZREM', leases, id)
      elseif was_quiet and (entry.state == 'h' or entry.state == 'H') then
        local more = held(entry.month, entry.counted, entry.charged)
        more.state = entry.state == 'h' and 'e' or 'E'
        put(id, entry, more, now + lease_ms)
      else
        local is_full = entry.state == 'H' or entry.state == 'E'
        put(id, entry, over(entry.month, is_full and entry.counted or entry.charged), now + OVER_KEPT_MS)
      end
    end
  end

  local function settle(id, nano)
    local entry = find(id)
    if not entry then return end
    add(entry.month, nano - entry.counted)
    add(entry.month .. ':open', -open_part(entry))
    redis.call('HDEL', owed, id)
    redis.call('ZREM', leases, id)
  end

  -- usage: the fields of an UnsettledCharge.
  local function charge(usage)
    local id, age_ms, counted, charged, is_running, is_full = unpack(usage)
    local entry = find(id)
    if is_running then
      if not entry then put(id, nil, held(month_of(now - age_ms), counted, charged, is_full), now + lease_ms) end
    else
      local in_month = entry and entry.month or month_of(now - age_ms)
      put(id, entry, over(in_month, counted), now + OVER_KEPT_MS)
    end
  end

  -- renewed: the fields of a RenewedCharge.
  local function renew(renewed)
    local id, counted, charged, is_full = unpack(renewed)
    local entry = find(id)
    if entry then put(id, entry, held(entry.month, counted, charged, is_full), now + lease_ms) end
  end

  -- What is left of a limit.
  local function left_of(limit)
    return difference(limit, redis.call('HGET', spent, month) or '0')
  end

  -- Changes what a gateway has set aside for the time when Redis is away; larger only where that fits.
  local function set_aside(id, nano, limit, may_grow)
    local entry = find(id)
    local has = entry and entry.month == month and entry.counted or 0
    if nano > has and not (may_grow and limit and nano - has <= left_of(limit)) then nano = has end
    if entry and (entry.month ~= month or nano == 0) then
      put(id, entry, nil)
      entry = nil
    end
    if nano > 0 then put(id, entry, held(month, nano, 0), now + ASIDE_LEASES * lease_ms) end
    return nano
  end

  -- Drops the sums of months that nobody can add to any more.
  local function forget_months()
    if redis.call('HEXISTS', spent, month) == 1 then return end
    redis.call('HSET', spent, month, 0)
    local flat = redis.call('HGETALL', spent)
    for at = 1, #flat, 2 do
      if flat[at] ~= 'seen' and string.sub(flat[at], 1, 7) < month_before then redis.call('HDEL', spent, flat[at]) end
    end
  end

  -- Reports of a gateway: the fields of a BudgetRequest.
  function budget.report(request)
    forget_months()
    end_owed_leases()
    for _, settled in ipairs(request.settled or {}) do settle(settled[1], settled[2]) end
    if request.aside then set_aside(request.aside[1], request.aside[2], request.limit, false) end
    for _, usage in ipairs(request.unsettled or {}) do charge(usage) end
    for _, renewed in ipairs(request.renewed or {}) do renew(renewed) end
  end

  -- Ms after which so much may fit; nil: it does now. parallel_wait_ms: where running requests have it reserved.
  function budget.wait_for(id, nano, limit, parallel_wait_ms)
    if nano <= 0 or redis.call('HEXISTS', owed, id) == 1 then return nil end
    local left = left_of(limit)
    if nano <= left then return nil end
    local open = tonumber(redis.call('HGET', spent, month .. ':open') or '0')
    return nano <= left + open and parallel_wait_ms or next_month - now
  end

  function budget.reserve(id, nano, is_full)
    if nano > 0 and redis.call('HEXISTS', owed, id) == 0 then
      put(id, nil, held(month, nano, 0, is_full), now + lease_ms)
    end
  end

  -- Ends the call; returns what is spent and what the gateway has set aside, as text.
  function budget.close(request)
    local aside = request.aside and set_aside(request.aside[1], request.aside[2], request.limit, true) or 0
    redis.call('PEXPIRE', spent, SPENT_KEPT_MS)
    redis.call('PEXPIRE', owed, SPENT_KEPT_MS)
    redis.call('PEXPIRE', leases, SPENT_KEPT_MS)
    return redis.call('HGET', spent, month) or '0', string.format('%.0f', aside)
  end

  return budget
end

