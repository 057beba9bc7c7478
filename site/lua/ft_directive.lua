-- The set of options of one submission: text in, checked values and the JSON document out.
--
-- The twin of spank/directive.c and slurm_ext/domain/directive.py. It knows nothing of job_desc.

local table_of_options, grammar = ...
local M = {}

local by_name = {}
for _, option in ipairs(table_of_options.options) do
    by_name[option.name] = option
end

-- A bad value, made safe for one line of a terminal and of slurmctld's log.
local function shown(text)
    local plain = text:gsub("[^ -~]", "?")
    return #plain > 80 and plain:sub(1, 80) .. "..." or plain
end
M.shown = shown

-- Take one value into `values`. True, or nil and a message with option, value, reason and fix.
function M.set(values, name, text, now)
    local option = by_name[name]
    if not option then
        return nil, string.format("--ft-%s=%s: there is no such option; see sbatch --help",
            shown(name), shown(text))
    end
    local value, reason = grammar.canonical(option, text, now)
    if not value then
        return nil, string.format("--ft-%s=%s: %s; %s", name, shown(text), reason, option.fix)
    end
    if option.excludes ~= "" and values[option.excludes] then
        return nil, string.format("--ft-%s=%s: --ft-%s=%s is also given; give only one of them",
            name, shown(text), option.excludes, values[option.excludes])
    end
    values[name] = value
    return true
end

-- "name=value name=value" into a table of checked values, or nil and a message.
function M.parse(text, now)
    local values = {}
    for word in text:gmatch("[^ \t\r\n\v\f]+") do
        local name, value = word:match("^([^=]*)=(.*)$")
        if not name then
            return nil, string.format("ft: %s: not NAME=VALUE; write ft: model=NAME samples=N ...",
                shown(word))
        end
        name = name:gsub("^%-%-", ""):gsub("^ft%-", "")
        local ok, message = M.set(values, name, value, now)
        if not ok then
            return nil, message
        end
    end
    return values
end

-- The part of a user's comment that is ours: from "ft:" to the next semicolon, or nil.
function M.from_comment(comment)
    local text = " " .. comment
    local _, stop = text:find("[ \t\n;]ft:")
    return stop and text:sub(stop + 1):match("^[^;\n]*")
end

-- Values of `extra` where `values` has none and nothing that excludes them.
function M.fill(values, extra)
    for _, option in ipairs(table_of_options.options) do
        local name = option.name
        if extra[name] and not values[name] and not values[option.excludes] then
            values[name] = extra[name]
        end
    end
end

-- The grammars let no quote, backslash or control character pass, so quoting is enough.
local function quoted(text)
    return '"' .. text .. '"'
end

local function pairs_of(option, value)
    local key = quoted(option.keys[1]) .. ":"
    local kind = option.grammar
    if kind == "model" then
        local name, revision = value:match("^([^@]*)@(.*)$")
        if name then
            return key .. quoted(name) .. "," .. quoted(option.keys[2]) .. ":" .. quoted(revision)
        end
    elseif kind == "batch" then
        local low, top = value:match("^([0-9]+)-([0-9]+)$")
        return key .. (low or value) .. "," .. quoted(option.keys[2]) .. ":" .. (top or value)
    elseif kind == "count" or kind == "decimal" then
        return key .. value
    elseif kind == "switch" then
        return key .. (value == "yes" and "true" or "false")
    elseif kind == "deadline" then
        return key .. string.format("%d", grammar.deadline_epoch(value))
    elseif kind == "time" then
        return key .. string.format("%d", grammar.time_seconds(value))
    elseif kind == "quality" then
        local metric, comparison, bound = value:match("^([^<>]*)([<>]=)(.*)$")
        return key .. "[" .. quoted(metric) .. "," .. quoted(comparison) .. "," .. bound .. "]"
    end
    return key .. quoted(value)
end

local REQ_KEYS = {
    "gpus", "nodes", "ntasks", "gpn", "gpt", "nmax", "cpt", "mem", "type", "why",
}

local function req_json(req)
    local parts = {}
    for _, key in ipairs(REQ_KEYS) do
        local value = req[key]
        if type(value) == "string" and value ~= "" then
            parts[#parts + 1] = quoted(key) .. ":" .. quoted(value)
        elseif type(value) == "number" and (value ~= 0 or key == "gpus") then
            parts[#parts + 1] = quoted(key) .. ":" .. string.format("%d", value)
        end
    end
    return "{" .. table.concat(parts, ",") .. "}"
end

-- The document, or nil and a message past the limit. `begin`, `shape` and `req` may be nil.
function M.json(values, begin, shape, req)
    local parts = { '"v":1' }
    for _, option in ipairs(table_of_options.options) do
        local value = values[option.name]
        if value and value ~= option.default then
            parts[#parts + 1] = pairs_of(option, value)
        end
    end
    if begin then
        parts[#parts + 1] = '"begin_s":' .. string.format("%d", begin)
    end
    if shape then
        parts[#parts + 1] = '"shape":' .. quoted(shape)
    end
    if req then
        parts[#parts + 1] = '"req":' .. req_json(req)
    end
    local text = "{" .. table.concat(parts, ",") .. "}"
    if #text > table_of_options.max_directive_bytes then
        return nil, string.format("--ft-*: the directive takes %d bytes and the limit is %d; "
            .. "shorten the dataset path, the model name or the GPU list", #text,
            table_of_options.max_directive_bytes)
    end
    return text
end

return M
