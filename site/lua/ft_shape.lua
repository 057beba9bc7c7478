-- How a job's ranks relate to its GPUs: which form it has, and what must change so that another
-- GPU count would arrive everywhere (job record, environment, steps).
--
-- Measured on Slurm 24.11; docs/directives.md has the table for users. `look` only reads the
-- request and answers; `normalise` writes. A request is one of:
--   shape and req      it can be resized, or is "fixed" with the reason in req.why
--   nil and a message  ranks and GPUs would drift apart: refused with the form to write instead

local grammar = ...
local M = {}

local NO_VAL, NO_VAL16 = 4294967294, 65534

-- Numbers that Slurm uses for "not set" become nil. "infinite" never occurs in a shape.
local function given(value)
    value = tonumber(value)
    if value == nil or value >= NO_VAL or value == NO_VAL16 or value == 0 then
        return nil
    end
    return value
end

local function text_of(value)
    return type(value) == "string" and value or ""
end

-- "gres/gpu:v100:4", "gres/gpu=1", "gres:gpu:2" (older), "gpu:2": count, type, rest.
local function read_tres(text)
    local found = { count = 0, type = "", kinds = 0, others = false }
    for item in text_of(text):gmatch("[^,]+") do
        local name = item:gsub("^gres[/:]", "")
        local tail = name:match("^gpu(.*)$")
        if tail and (tail == "" or tail:find("^[:=]")) then
            local kind, count = tail:match("^:([^:=]+)[:=]([0-9]+)$")
            if not kind then
                count = tail:match("^[:=]([0-9]+)$")
                kind = not count and tail:match("^:([A-Za-z][^:=]*)$") or ""
            end
            found.count = found.count + (tonumber(count) or 1)
            found.type = kind
            found.kinds = found.kinds + 1
        elseif not name:find("^cpu[=:]") then
            found.others = true
        end
    end
    return found
end

-- What the request says, in plain fields. Also used for jobs that are not to be resized.
function M.look(job)
    local req = {
        per_node = read_tres(job.tres_per_node),
        per_job = read_tres(job.tres_per_job),
        per_task = read_tres(job.tres_per_task),
        nodes_given = given(job.min_nodes),
        range_top = nil,
        ntasks_given = given(job.num_tasks),
        tpn = given(job.ntasks_per_node),
        cpt = given(job.cpus_per_task) or 0,
        mem = given(job.min_mem_per_node) or 0,
    }
    req.nodes = req.nodes_given or 1
    local top = given(job.max_nodes)
    if top and top > req.nodes then
        req.range_top = top
    end
    req.ntasks = req.ntasks_given or req.nodes * (req.tpn or 1)
    if req.per_job.count > 0 then
        req.gpus = req.per_job.count
    elseif req.per_task.count > 0 then
        req.gpus = req.per_task.count * req.ntasks
    else
        req.gpus = req.per_node.count * req.nodes
    end
    return req
end

-- Reasons for which a job is ordered and never resized, whatever its form.
local function why_fixed(job, look)
    if job.script == nil then
        return "no-script"
    elseif given(job.het_job_offset) or tonumber(job.het_job_offset) == 0 then
        return "het"
    elseif tonumber(job.shared) == 0 then
        return "exclusive"
    elseif text_of(job.req_nodes) ~= "" then
        return "nodelist"
    elseif text_of(job.partition):find(",") then
        return "partitions"
    elseif text_of(job.qos):find(",") then
        return "qos"
    elseif look.per_node.others or look.per_job.others or look.per_task.others then
        return "other-gres"
    elseif look.per_node.kinds + look.per_job.kinds + look.per_task.kinds > 1 then
        return "gpu-forms"
    end
    return nil
end

local PER_RANK = "write -n %d --gpus-per-task=1 for one rank per GPU"
local LAUNCHER = "-N %d --ntasks-per-node=1 --gres=gpu:%d for one launcher per node"

local function refuse(why, gpus, nodes)
    local per_node = math.max(1, math.ceil(gpus / nodes))
    return nil, string.format("%s; " .. PER_RANK .. ", " .. LAUNCHER
        .. ", or --ft-gpus=requested to keep the job as it is", why, gpus, nodes, per_node)
end

-- The form of a resizable request: shape and req, or nil and a message.
local function classify(job, look)
    local nodes, ntasks, tpn = look.nodes, look.ntasks_given, look.tpn
    local one_node = nodes == 1 and not look.range_top
    local req = {
        gpus = look.gpus, nodes = nodes, ntasks = look.ntasks, cpt = look.cpt, mem = look.mem,
        nmax = look.range_top or 0, gpn = 0, gpt = 0,
    }

    if text_of(job.tres_per_socket) ~= "" then
        return refuse("GPUs per socket cannot be resized", math.max(1, look.gpus), nodes)
    elseif given(job.ntasks_per_tres) then
        return refuse("--ntasks-per-gpu cannot be resized", look.ntasks, nodes)
    elseif look.gpus < 1 then
        return refuse("the job asks for no GPU", 1, 1)
    end

    if look.per_task.count > 0 then
        req.type = look.per_task.type
        req.gpt = look.per_task.count
        if tpn then -- scontrol cannot change ranks per node
            req.gpn = tpn * req.gpt
            req.gpus, req.ntasks = req.gpn * nodes, tpn * nodes
            return "tasks-per-node", req
        elseif req.gpt > 1 then
            return refuse(string.format("--gpus-per-task=%d cannot be resized", req.gpt), look.gpus,
                look.ntasks)
        end
        return "rank-per-gpu", req
    end

    local total = look.per_job.count
    req.type = total > 0 and look.per_job.type or look.per_node.type
    if total > 0 then
        local single = (ntasks or 1) == 1 and not tpn
        local launchers = tpn == 1 or (ntasks == nodes and nodes > 1)
        local ranks = ntasks == total and look.nodes_given == 1
        if one_node and (single or launchers or ranks) then
            req.gpn = total
        elseif nodes > 1 and launchers and not look.range_top and total % nodes == 0 then
            req.gpn = total / nodes
        else
            return refuse("--gpus may spread unevenly over nodes and ranks", total, nodes)
        end
        req.to_per_node = true
    else
        req.gpn = look.per_node.count
    end

    if tpn == 1 then
        req.ntasks = nodes
        return "launcher-per-node", req
    elseif tpn then
        req.ntasks = tpn * nodes
        return "tasks-per-node", req
    elseif (ntasks or 1) == 1 and nodes == 1 then
        req.nmax = look.range_top or 1 -- one task sees the GPUs of one node
        return "launcher-per-node", req
    elseif not ntasks or ntasks == nodes then
        req.ntasks, req.set_tpn = nodes, 1
        return "launcher-per-node", req
    elseif one_node and ntasks == req.gpn then
        req.nmax, req.one_node = 1, true -- without -N, Slurm could spread the ranks
        return "single-node", req
    elseif ntasks == nodes * req.gpn and not look.range_top then
        req.set_tpn = req.gpn
        return "tasks-per-node", req
    end
    return refuse(string.format("%d tasks on %d GPUs cannot be resized together", look.ntasks,
        look.gpus), look.gpus, nodes)
end

-- Whether the listed counts fit the form; auto takes what fits.
local function check_counts(gpus, req, shape)
    if gpus == "auto" then
        return true
    end
    local spans = grammar.gpu_spans(gpus, 4096)
    local unit = shape == "tasks-per-node" and req.gpn or 1
    local listed = false
    for _, span in ipairs(spans) do
        listed = listed or (span[1] <= req.gpus and req.gpus <= span[2])
        if unit > 1 and (span[1] % unit ~= 0 or span[2] > span[1]) then
            return nil, string.format("--ft-gpus=%s: a job of this form can only have multiples of "
                .. "%d GPUs; list only those, or " .. PER_RANK, gpus, unit, req.gpus)
        end
    end
    if not listed then
        return nil, string.format("--ft-gpus=%s: the requested %d GPUs are not in the list; add "
            .. "them or request one of the listed counts", gpus, req.gpus)
    end
    return true
end

-- shape and req for the directive, or nil and a message. `gpus` is the canonical --ft-gpus.
function M.decide(job, gpus)
    local look = M.look(job)
    local plain = {
        gpus = look.gpus, nodes = look.nodes, ntasks = look.ntasks, cpt = look.cpt, mem = look.mem,
        nmax = look.range_top or 0,
    }
    if gpus == "requested" then
        return "fixed", plain
    end
    local why = why_fixed(job, look)
    if why then
        plain.why = why
        return "fixed", plain
    end
    local shape, req = classify(job, look)
    if not shape then
        return nil, "--ft-gpus=" .. gpus .. ": " .. req
    end
    local ok, message = check_counts(gpus, req, shape)
    if not ok then
        return nil, message
    end
    return shape, req
end

-- Variables with which sbatch would send the submitted count into every step of the job.
local STALE = { "SLURM_GPUS", "SLURM_GPUS_PER_NODE" }

-- Change a resizable request so that a later change of its count arrives everywhere.
function M.normalise(job, req)
    if req.to_per_node then
        local kind = req.type ~= "" and req.type .. ":" or ""
        job.tres_per_node = "gres/gpu:" .. kind .. string.format("%d", req.gpn)
        job.tres_per_job = ""
        job.min_nodes, job.max_nodes = req.nodes, req.nodes
    elseif req.one_node then
        job.min_nodes, job.max_nodes = 1, 1
    end
    if req.set_tpn then
        job.ntasks_per_node = req.set_tpn
        job.environment["SLURM_NTASKS_PER_NODE"] = string.format("%d", req.set_tpn)
    end
    for _, name in ipairs(STALE) do
        if job.environment[name] then
            job.environment[name] = ""
        end
    end
end

return M
