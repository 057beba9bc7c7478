-- The Lua twin of spank/tests/grammar_check.c: same lines in, same lines out.
local here = arg[1] .. "/"
local function part(name, ...)
    return assert(loadfile(here .. name))(...)
end
local options = part("ft_options.lua")
local grammar = part("ft_grammar.lua", options)
local directive = part("ft_directive.lua", options, grammar)

local function unescape(text)
    return (text:gsub("\\x(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end))
end

local function split(line)
    local words = {}
    for word in (line .. "\t"):gmatch("([^\t]*)\t") do
        words[#words + 1] = word
    end
    return words
end

local function answer(line)
    local words = split(line)
    local now, values = tonumber(words[1]), {}
    for i = 2, #words, 2 do
        local ok, message = directive.set(values, words[i], unescape(words[i + 1]), now)
        if not ok then
            return "err\t" .. message
        end
    end
    local json, message = directive.json(values)
    if not json then
        return "err\t" .. message
    end
    local comment = {}
    for _, option in ipairs(options.options) do
        if values[option.name] then
            comment[#comment + 1] = option.name .. "=" .. values[option.name]
        end
    end
    return "ok\t" .. table.concat(comment, " ") .. "\t" .. json
end

for line in io.lines() do
    io.write(answer(line), "\n")
    io.flush()
end
