-- slurm-ext's part of job_submit.lua. A site's own job_submit.lua loads it with two lines at its end,
-- which are the last two lines of ours.
--
-- `wrap` puts itself around the slurm_job_submit and slurm_job_modify that are defined above them:
-- the site decides first, then the directive is written into AdminComment, a resizable job is made
-- so that its GPU count can change, and it gets a short grace so that the daemon sees it before it
-- starts. It never raises (an error of ours lets the job through as a plain one), never blocks (no
-- file, no process, no network after loading), and lets the daemon's own updates pass.
--
-- slurmctld loads the script anew when job_submit.lua itself changes: touch it after editing here.

local M = {}

-- What a site may set, in /etc/slurm/lua/config.lua (a file that returns a table).
M.config = {
    -- Seconds by which the earliest start of a resizable batch job is put off at submission,
    -- so that Slurm does not start it in its submitted shape at once. 0 = off.
    submit_grace_s = 5,
    -- The daemon's Unix user; its updates pass the site's slurm_job_modify unseen.
    daemon_user = "slurm-ext",
    -- Tell users at submission when a job they meant to be resizable is not.
    tell_users = true,
}

local EINVAL, ESLURM_INVALID_GRES = 22, 2072
-- What the plugin sends (spank/submit.c); here without the SPANK_ that prologs see in front.
local SENT = "SLURM_EXT_DIRECTIVE="

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/lua/"

local function load_part(name, ...)
    return assert(loadfile(here .. name))(...)
end

local options = load_part("ft_options.lua")
local grammar = load_part("ft_grammar.lua", options)
local directive = load_part("ft_directive.lua", options, grammar)
local shapes = load_part("ft_shape.lua", grammar)
M.grammar, M.directive, M.shapes, M.options = grammar, directive, shapes, options

local function log_error(message)
    slurm.log_error("slurm-ext: %s", message)
end

-- A wrong configuration file must not cost a submission: it is told once, at loading.
local function load_config()
    local file = io.open(here .. "config.lua")
    if not file then
        return
    end
    file:close()
    local ok, site = pcall(dofile, here .. "config.lua")
    if not ok or type(site) ~= "table" then
        log_error("config.lua is not used: " .. tostring(ok and "it returns no table" or site))
        return
    end
    for key, value in pairs(site) do
        if type(M.config[key]) ~= type(value) then
            log_error("config.lua: key " .. tostring(key) .. " is unknown or of the wrong type")
        else
            M.config[key] = value
        end
    end
end

-- The daemon's uid, read once; nil where the user is not in /etc/passwd.
local function daemon_uid()
    local file = io.open("/etc/passwd")
    if not file then
        return nil
    end
    for line in file:lines() do
        local user, uid = line:match("^([^:]*):[^:]*:([0-9]+):")
        if user == M.config.daemon_user then
            file:close()
            return tonumber(uid)
        end
    end
    file:close()
    return nil
end

-- The directive's text as the plugin sent it, or nil. The table starts at index 0.
local function from_plugin(job)
    local control = job.spank_job_env
    if type(control) ~= "table" then
        return nil
    end
    for _, entry in pairs(control) do
        if type(entry) == "string" and entry:sub(1, #SENT) == SENT then
            return entry:sub(#SENT + 1)
        end
    end
    return nil
end

-- Checked values of the submission; nil where there are none; nil and a message where one is bad.
-- What the plugin sent is checked again: any client could have written it.
local function values_of(job, now)
    local sent = from_plugin(job)
    local said = type(job.comment) == "string" and directive.from_comment(job.comment) or nil
    if not sent and not said then
        return nil
    end
    local values, message = directive.parse(sent or "", now)
    if not values then
        return nil, message
    end
    if said then
        local extra
        extra, message = directive.parse(said, now)
        if not extra then
            return nil, "--comment: " .. message
        end
        directive.fill(values, extra)
    end
    if next(values) == nil then
        return nil
    end
    return values
end

-- AdminComment without a directive that somebody else put there.
local function without_marker(text)
    local clean = (" " .. text):gsub("%sft:%b{}", ""):gsub("%sft:{.*$", "")
    return (clean:gsub("^%s+", ""))
end

local function grant_grace(job, now)
    if M.config.submit_grace_s > 0 and (tonumber(job.begin_time) or 0) <= now then
        job.begin_time = now + M.config.submit_grace_s
    end
end

local WORDS = {
    ["no-script"] = "only batch jobs can be", het = "it has several components",
    exclusive = "--exclusive", nodelist = "--nodelist", partitions = "several partitions",
    qos = "several QOS", ["other-gres"] = "other generic resources",
    ["gpu-forms"] = "GPUs are asked for in several ways",
}

-- SUCCESS, or an error code after the reason was told.
local function submit(job)
    local now = os.time()
    local values, message = values_of(job, now)
    local old = type(job.admin_comment) == "string" and job.admin_comment or ""
    local clean = without_marker(old)
    if message then
        slurm.log_user("%s", message)
        return EINVAL
    end
    if not values then
        if clean ~= old then
            job.admin_comment = clean
        end
        return slurm.SUCCESS
    end

    local gpus = values.gpus or "requested"
    local shape, req = shapes.decide(job, gpus)
    if not shape then
        slurm.log_user("%s", req)
        return ESLURM_INVALID_GRES
    end
    local begin = tonumber(job.begin_time)
    local text
    text, message = directive.json(values, begin and begin > now and begin or nil, shape, req)
    if not text then
        slurm.log_user("%s", message)
        return EINVAL
    end

    if shape ~= "fixed" then
        shapes.normalise(job, req)
        grant_grace(job, now)
    elseif req.why and M.config.tell_users then
        slurm.log_user("%s", "slurm-ext: this job is ordered but not resized: " .. WORDS[req.why])
    end
    if job.script ~= nil then
        for _, option in ipairs(options.options) do
            if values[option.name] then
                job.environment[option.job_env] = values[option.name]
            end
        end
        job.environment["FT_DIRECTIVE"] = text
    end
    -- Last: where a write above failed, the daemon must take the job for a plain one.
    job.admin_comment = (clean == "" and "" or clean .. " ") .. "ft:" .. text
    return slurm.SUCCESS
end

-- For a site that calls it by itself instead of wrapping.
function M.submit(job)
    local ok, result = pcall(submit, job)
    if ok then
        return result
    end
    pcall(log_error, "the job is submitted as a plain one: " .. tostring(result))
    return slurm.SUCCESS
end

-- Whether this is the daemon's own update: a site's rules for users are not meant for it.
function M.is_daemon(submit_uid)
    return M.uid ~= nil and tonumber(submit_uid) == M.uid
end

function M.wrap()
    local site_submit, site_modify = slurm_job_submit, slurm_job_modify

    function slurm_job_submit(job, partitions, submit_uid)
        if site_submit then
            local result = site_submit(job, partitions, submit_uid)
            if result ~= slurm.SUCCESS then
                return result
            end
        end
        return M.submit(job)
    end

    function slurm_job_modify(job, record, partitions, submit_uid)
        if M.is_daemon(submit_uid) or not site_modify then
            return slurm.SUCCESS
        end
        return site_modify(job, record, partitions, submit_uid)
    end
end

load_config()
M.uid = daemon_uid()

return M
