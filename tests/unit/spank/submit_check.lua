-- Runs the installed module as slurmctld would, with a fake `slurm` table and one job request.
-- arg[1]: module folder; arg[2]: a Lua file that returns { job = {...}, uid = N, call = "submit" or
-- "modify", site = "accept" | "refuse" | "none", break_at = field that raises when read,
-- break_set = field that raises when written }.
-- Prints lines: rc, user (message), log (message), env.NAME and the job's fields.
local case = dofile(arg[2])
local lines = {}
local function say(kind, format, ...)
    local text = string.format(format, ...)
    lines[#lines + 1] = kind .. "\t" .. text:gsub("\n", " ")
end

slurm = {
    SUCCESS = 0,
    ERROR = -1,
    log_user = function(...) say("user", ...) end,
    log_error = function(...) say("log", ...) end,
    log_info = function() end,
}

if case.site ~= "none" then
    function slurm_job_submit(job)
        lines[#lines + 1] = "site\tsubmit"
        if case.site_comment then
            job.admin_comment = case.site_comment
        end
        return case.site == "refuse" and 2002 or slurm.SUCCESS
    end
    function slurm_job_modify()
        lines[#lines + 1] = "site\tmodify"
        return case.site == "refuse" and 2002 or slurm.SUCCESS
    end
end

-- The path in job_submit.lua is the administrator's; here it is the tree's.
local ok, slurm_ext = pcall(dofile, arg[1] .. "/slurm_ext.lua")
assert(ok, slurm_ext)
for key, value in pairs(case.config or {}) do
    slurm_ext.config[key] = value
end
slurm_ext.uid = 900
slurm_ext.wrap()

-- Like Slurm's: string fields set to "" are gone, an unknown field cannot be set.
local fields = case.job
local job = setmetatable({}, {
    __index = function(_, key)
        if key == case.break_at then
            error("broken field " .. key)
        end
        return fields[key]
    end,
    __newindex = function(_, key, value)
        if key == case.break_set then
            error("cannot set " .. key)
        end
        fields[key] = value ~= "" and value or nil
    end,
})

local rc
if case.call == "modify" then
    rc = slurm_job_modify(job, {}, {}, case.uid)
else
    rc = slurm_job_submit(job, {}, case.uid or 2001)
end
lines[#lines + 1] = "rc\t" .. string.format("%d", rc)
for key, value in pairs(fields) do
    if key == "environment" then
        for name, text in pairs(value) do
            lines[#lines + 1] = "env." .. name .. "\t" .. text
        end
    elseif type(value) == "number" then
        lines[#lines + 1] = key .. "\t" .. string.format("%d", value)
    elseif type(value) == "string" then
        lines[#lines + 1] = key .. "\t" .. value
    end
end
print(table.concat(lines, "\n"))
