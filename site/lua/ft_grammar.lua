-- Value grammars of the --ft-* options: text in, canonical text out, or nil and a reason.
--
-- The twin of slurm_ext/domain/grammar.py and spank/grammar.c; a property test holds the three to
-- the same answers. Lua 5.1 to 5.4. Sets are written out ([A-Za-z]) because %a follows the locale.
-- Numbers stay text wherever possible: 5.3 and later would write 4.0 where 5.1 writes 4.

local table_of_options = ...
local M = {}

local MAX_VALUE = 512
local MAX_REVISION = 64
local MAX_METRIC = 48
local MAX_TIME_DIGITS = 9
local MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
local TEN_YEARS_S = 10 * 365 * DAY_S
local FIRST_S, END_S = 946684800, 7258118400 -- 2000-01-01 and 2200-01-01 in UTC

local function whole(number)
    return string.format("%d", number)
end

-- A whole number in [1, high], or nil and the reason.
local function read_count(text, high)
    if not text:find("^[1-9][0-9]*$") then
        return nil, "not a whole number above 0"
    end
    if #text > 15 or tonumber(text) > high then
        return nil, "out of range"
    end
    return tonumber(text)
end

local function read_range(text, high)
    local first, last = text:match("^([^-]*)-(.*)$")
    local low, reason = read_count(first or text, high)
    if not low then
        return nil, reason
    end
    local top = low
    if last then
        top, reason = read_count(last, high)
        if not top then
            return nil, reason
        end
    end
    if top < low then
        return nil, "the range runs backwards"
    end
    return low, top
end

local function range_text(low, top)
    return top > low and whole(low) .. "-" .. whole(top) or whole(low)
end

-- Unsigned decimal with trailing zeros dropped, or nil and the reason.
local function read_decimal(text, max_fraction, high)
    local int, fraction = text:match("^([0-9]+)%.([0-9]+)$")
    if not int then
        int, fraction = text:match("^[0-9]+$"), ""
    end
    if not int or (#int > 1 and int:sub(1, 1) == "0") or #fraction > max_fraction then
        return nil, "not a decimal number"
    end
    fraction = fraction:gsub("0+$", "")
    if #int > 15 or tonumber(int) + (fraction ~= "" and 1 or 0) > high then
        return nil, "too large"
    end
    return fraction == "" and int or int .. "." .. fraction
end

local function read_walltime(text)
    local days, clock = text:match("^([0-9]+)-([0-9:]+)$")
    clock = clock or text
    local fields = {}
    if not clock:find("^[0-9]+$") and not clock:find("^[0-9]+:[0-9]+$")
        and not clock:find("^[0-9]+:[0-9]+:[0-9]+$") then
        return nil, "not a time"
    end
    for field in clock:gmatch("[0-9]+") do
        if #field > MAX_TIME_DIGITS then
            return nil, "the time is too long"
        end
        fields[#fields + 1] = tonumber(field)
    end
    if days and #days > MAX_TIME_DIGITS then
        return nil, "the time is too long"
    end
    local hours, minutes, seconds
    if days then
        hours, minutes, seconds = fields[1], fields[2] or 0, fields[3] or 0
        if hours > 23 then
            return nil, "the hours after days go from 0 to 23"
        end
    elseif #fields == 3 then
        hours, minutes, seconds = fields[1], fields[2], fields[3]
    else
        hours, minutes, seconds = 0, fields[1], fields[2] or 0
    end
    if seconds > 59 or (minutes > 59 and (days or #fields == 3)) then
        return nil, "minutes and seconds below a larger unit go from 0 to 59"
    end
    return (tonumber(days) or 0) * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds
end

local UNITS = { minute = MINUTE_S, hour = HOUR_S, day = DAY_S, week = 7 * DAY_S }

local function read_relative(text)
    local number, unit = text:match("^([1-9][0-9]*)([a-z]+)$")
    local unit_s = unit and (UNITS[unit] or UNITS[unit:match("^(.*)s$")])
    local seconds, reason
    if unit_s and #number <= 6 then
        seconds = tonumber(number) * unit_s
    elseif text:find("[:-]") then
        seconds, reason = read_walltime(text)
        if not seconds then
            return nil, reason
        end
    else
        return nil, "a number without a unit is ambiguous"
    end
    if seconds > TEN_YEARS_S then
        return nil, "more than ten years ahead"
    end
    return seconds
end

local function is_leap(year)
    return (year % 4 == 0 and year % 100 ~= 0) or year % 400 == 0
end

local MONTH_DAYS = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 }

local function days_from_epoch(year, month, day)
    local y = year - 1
    local days = y * 365 + math.floor(y / 4) - math.floor(y / 100) + math.floor(y / 400) - 719162
    for m = 1, month - 1 do
        days = days + MONTH_DAYS[m]
    end
    return days + (month > 2 and is_leap(year) and 1 or 0) + day - 1
end

local function read_absolute(text)
    local form = "not a date and time"
    local date, rest = text:match("^([0-9][0-9][0-9][0-9]%-[0-9][0-9]%-[0-9][0-9])(.*)$")
    if not date then
        return nil, form
    end
    local year, month, day = date:match("^([0-9]+)%-([0-9]+)%-([0-9]+)$")
    local hour, minute, second, zone = "0", "0", "0", ""
    if rest ~= "" then
        hour, minute, rest = rest:match("^T([0-9][0-9]):([0-9][0-9])(.*)$")
        if not hour then
            return nil, form
        end
        local sec, after = rest:match("^:([0-9][0-9])(.*)$")
        second, zone = sec or "0", after or rest
        if zone ~= "" and zone ~= "Z" and not zone:find("^[+-][0-9][0-9]:[0-9][0-9]$") then
            return nil, form
        end
    end
    year, month, day = tonumber(year), tonumber(month), tonumber(day)
    hour, minute, second = tonumber(hour), tonumber(minute), tonumber(second)
    if year < 2000 or year > 2199 then
        return nil, "the year is not from 2000 to 2199"
    end
    if month < 1 or month > 12 or day < 1
        or day > MONTH_DAYS[month] + (month == 2 and is_leap(year) and 1 or 0) then
        return nil, "there is no such day"
    end
    if hour > 23 or minute > 59 or second > 59 then
        return nil, "there is no such time of day"
    end
    if zone == "" then
        return os.time({ year = year, month = month, day = day, hour = hour, min = minute,
            sec = second })
    end
    local epoch = days_from_epoch(year, month, day) * DAY_S + hour * HOUR_S + minute * MINUTE_S
        + second
    if zone == "Z" then
        return epoch
    end
    local off_hour, off_minute = tonumber(zone:sub(2, 3)), tonumber(zone:sub(5, 6))
    if off_hour > 14 or off_minute > 59 then
        return nil, "there is no such time zone"
    end
    local offset = off_hour * HOUR_S + off_minute * MINUTE_S
    return zone:sub(1, 1) == "+" and epoch - offset or epoch + offset
end

local function is_choice(option, text)
    for _, choice in ipairs(option.choices) do
        if choice == text then
            return true
        end
    end
    return false
end

local parsers = {}

function parsers.model(option, text)
    local name, revision = text:match("^([^@]*)@(.*)$")
    name = name or text
    if not name:find("^[A-Za-z0-9][A-Za-z0-9._/+:-]*$")
        or (revision and not revision:find("^[A-Za-z0-9][A-Za-z0-9._/+-]*$")) then
        return nil, "not a model name"
    end
    if #name > option.high or (revision and #revision > MAX_REVISION) then
        return nil, "the name or the revision is too long"
    end
    return text
end

function parsers.path(option, text)
    if #text > option.high then
        return nil, "the path is too long"
    end
    if not text:find("^[A-Za-z0-9._/+:@%%,=#][A-Za-z0-9._/+:@%%,=#~-]*$") then
        return nil, "a character that is not allowed in the path"
    end
    return text
end

function parsers.count(option, text)
    local value, reason = read_count(text, option.high)
    return value and text, reason
end

function parsers.decimal(option, text)
    local value, reason = read_decimal(text, 4, option.high)
    if value == "0" then
        return nil, "not above 0"
    end
    return value, reason
end

function parsers.batch(option, text)
    local low, top = read_range(text, option.high)
    if not low then
        return nil, top
    end
    return range_text(low, top)
end

-- Sorted spans {low, top}, joined where they touch, or nil and the reason.
function M.gpu_spans(text, high)
    local spans = {}
    for item in (text .. ","):gmatch("([^,]*),") do
        local low, top = read_range(item, high)
        if not low then
            return nil, top
        end
        spans[#spans + 1] = { low, top }
    end
    table.sort(spans, function(a, b)
        return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
    end)
    local joined = { spans[1] }
    for i = 2, #spans do
        local last = joined[#joined]
        if spans[i][1] > last[2] + 1 then
            joined[#joined + 1] = spans[i]
        elseif spans[i][2] > last[2] then
            last[2] = spans[i][2]
        end
    end
    if #joined > table_of_options.max_gpu_ranges then
        return nil, "too many separate ranges"
    end
    return joined
end

function parsers.gpus(option, text)
    if text == "requested" or text == "auto" then
        return text
    end
    local spans, reason = M.gpu_spans(text, option.high)
    if not spans then
        return nil, reason
    end
    local parts = {}
    for i, span in ipairs(spans) do
        parts[i] = range_text(span[1], span[2])
    end
    return table.concat(parts, ",")
end

function parsers.shape(option, text)
    local sides = 0
    for side in (text .. "x"):gmatch("([^x]*)x") do
        sides = sides + 1
        local value, reason = read_count(side, option.high)
        if not value then
            return nil, reason
        end
    end
    if sides > 4 then
        return nil, "more than four numbers"
    end
    return text
end

function parsers.choice(option, text)
    if not is_choice(option, text) then
        return nil, "not one of the choices"
    end
    return text
end

parsers.switch = parsers.choice

function parsers.layers(option, text)
    return (is_choice(option, text) and parsers.choice or parsers.count)(option, text)
end

function parsers.deadline(_, text, now)
    local epoch, reason
    if text:sub(1, 4) == "now+" then
        epoch, reason = read_relative(text:sub(5))
        epoch = epoch and epoch + math.floor(now)
    else
        epoch, reason = read_absolute(text)
    end
    if not epoch then
        return nil, reason
    end
    if epoch < FIRST_S or epoch >= END_S then -- a zone can move the last day out of the range
        return nil, "the year is not from 2000 to 2199"
    end
    if epoch <= now then
        return nil, "this time has passed"
    end
    return os.date("!%Y-%m-%dT%H:%M:%SZ", epoch)
end

function parsers.quality(option, text)
    local metric, comparison, sign, bound =
        text:match("^([A-Za-z][A-Za-z0-9_./@-]*)([<>]=)(%-?)([0-9.]+)$")
    if not metric then
        return nil, "not a metric with a bound"
    end
    local value, reason = read_decimal(bound, 6, option.high)
    if not value then
        return nil, reason
    end
    if #metric > MAX_METRIC then
        return nil, "the name of the metric is too long"
    end
    return metric .. comparison .. (value == "0" and "" or sign) .. value
end

function parsers.time(option, text)
    local seconds, reason = read_walltime(text)
    if not seconds then
        return nil, reason
    end
    if seconds < option.low or seconds > option.high then
        return nil, "out of range"
    end
    local rest = seconds % DAY_S
    local clock = string.format("%02d:%02d:%02d", math.floor(rest / HOUR_S),
        math.floor(rest % HOUR_S / MINUTE_S), rest % MINUTE_S)
    local days = math.floor(seconds / DAY_S)
    return days > 0 and whole(days) .. "-" .. clock or clock
end

-- Canonical text, or nil and the reason.
function M.canonical(option, text, now)
    if text == "" then
        return nil, "the value is empty"
    end
    if #text > MAX_VALUE then
        return nil, "the value is too long"
    end
    return parsers[option.grammar](option, text, now)
end

-- Seconds of a canonical TIME, seconds since the epoch of a canonical deadline.
M.time_seconds = read_walltime
M.deadline_epoch = read_absolute

return M
