"""The process side of the fake Slurm commands (see ``commands.py``).

Imports next to nothing: it is started hundreds of times by the unit tests.
"""

import os
import sys
import time

MARK = "@MARK@"
_VARIABLES = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "TZ": "UTC0"}
# squeue knows it, and leaves it out of what it says of itself (24.11 and 26.05).
_UNLISTED = ("tres-per-node",)
_QOS = (
    "Name,Flags,MaxTRES,GrpTRES,MaxTRESPU,MaxTRESPA,MaxWall,MinTRES,MaxTRESMins,"
    "GrpTRESRunMins,GrpTRESMins"
)
_ASSOC = (
    "Account,User,Partition,ParentName,MaxTRES,GrpTRES,MaxWall,MaxTRESMins,GrpTRESRunMins,"
    "GrpTRESMins"
)
_UPDATE_KEYWORDS = """
    jobid sitefactor starttime numnodes numtasks numcpus trespernode tresperjob trespertask
    reqnodelist nodelist excnodelist timelimit nice priority features comment admincomment
    cpuspertask minmemorynode minmemorycpu requeue"""


def main(command: str, folder: str, recorded: str) -> None:
    """Answer one command line, or go wrong as told."""
    with open(f"{folder}/fault.{command}") as file:
        fault = file.read()
    for name, value in _VARIABLES.items():
        if os.environ.get(name) != value:
            fail(f"{command}: environment {name}={os.environ.get(name)!r}, wanted {value!r}")
    for name in os.environ:
        if name.startswith(("SQUEUE_", "SINFO_")) or name == "SLURM_CLUSTERS":
            fail(f"{command}: the environment still holds {name}")
    if fault == "hang":
        time.sleep(600)
    if fault == "hang-child":
        # A site's wrapper script: its child holds the pipe when only the script is killed.
        os.spawnlp(os.P_WAIT, "sleep", "sleep", "600")
    if fault == "fail":
        fail("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    if fault == "signal":
        os.kill(os.getpid(), 11)
    answer = _ANSWERS[command](sys.argv[1:], recorded, folder)
    if fault == "cut":
        end = len(answer) * 2 // 3
        answer = answer[: end - 1 if answer[:end].endswith(b"\n") else end]
    if fault == "short":
        answer = b"\n".join(answer.split(b"\n")[:4]) + b"\n"
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def fail(message: str, rc: int = 1) -> None:
    sys.stderr.write(message + "\n")
    raise SystemExit(rc)


def recording(folder: str, name: str) -> bytes:
    with open(f"{folder}/{name}", "rb") as file:
        return file.read()


def squeue(arguments: list[str], recorded: str, _folder: str) -> bytes:
    if arguments == ["--helpFormat"]:
        return recording(recorded, "squeue_help_format.txt")
    if arguments[0].startswith("--json"):
        return _squeue_json(arguments, recorded)
    if arguments[:6] != ["-h", "-a", "-t", "all", "-r", "-O"] or len(arguments) not in (7, 9):
        fail(f"squeue: these arguments were not recorded: {arguments}")
    *front, last = arguments[6].split(",")
    columns = []
    known = recording(recorded, "squeue_help_format.txt").decode().lower().split()
    for field in [*front, last]:
        name, _, suffix = field.partition(":")
        if name.lower() not in (*known, *_UNLISTED) or not suffix.startswith("\x1f"):
            fail(f"squeue: error: Invalid job format specification: {field!r}")
        columns.append(name)
    mark = last.partition("\x1f")[2]
    files = {
        "admin_comment": "squeue_admin_comment.txt",
        "Comment": "squeue_comment.txt",
        "Account": "squeue.txt",
    }
    rows = recording(recorded, files[columns[-1]]).split(f"\x1f{MARK}\n".encode())[:-1]
    if len(rows[0].split(b"\x1f")) < len(columns):
        fail(f"squeue: the recording has other columns than {columns}")
    if len(arguments) == 9:
        if arguments[7] != "-j":
            fail(f"squeue: these arguments were not recorded: {arguments}")
        wanted = arguments[8].split(",")
        at = columns.index("JobArrayID")
        rows = [r for r in rows if _number(r.split(b"\x1f")[at].decode()) in wanted]
        if not rows and len(wanted) == 1:
            fail("slurm_load_jobs error: Invalid job id specified")
    return b"".join(row + f"\x1f{mark}\n".encode() for row in rows)


def _squeue_json(arguments: list[str], recorded: str) -> bytes:
    """This release knows v0.0.40 to v0.0.42; the recordings are of the whole queue."""
    import gzip
    import json

    parser = arguments[0].partition("=")[2]
    if parser not in os.environ.get("FAKE_DATA_PARSERS", "v0.0.42 v0.0.40").split():
        fail(f"squeue: fatal: Unable to find plugin: serializer/data_parser {parser!r}")
    if arguments[1] != "-j" or len(arguments) != 3:
        fail(f"squeue: these arguments were not recorded: {arguments}")
    with gzip.open(f"{recorded}/squeue_{parser}.json.gz") as file:
        answer = json.loads(file.read().decode(errors="replace"))
    wanted = arguments[2].split(",")
    answer["jobs"] = [
        job
        for job in answer["jobs"]
        if {str(job["job_id"]), str(job["het_job_id"]["number"])} & set(wanted)
    ]
    if not answer["jobs"] and len(wanted) == 1:
        fail("slurm_load_jobs error: Invalid job id specified")
    return json.dumps(answer).encode()


def _number(text: str) -> str:
    digits = ""
    for char in text:
        if not char.isdigit():
            break
        digits += char
    return digits


def sprio(arguments: list[str], recorded: str, _folder: str) -> bytes:
    if arguments != ["-h", "-o", "%i %Y %S %N %A %B %F %J %P %Q %T"]:
        fail(f"sprio: these arguments were not recorded: {arguments}")
    return recording(recorded, "sprio.txt")


def scontrol(arguments: list[str], recorded: str, folder: str) -> bytes:
    if arguments == ["show", "config"]:
        return recording(recorded, "scontrol_config.txt")
    if arguments == ["-o", "show", "topology"]:
        return recording(recorded, "scontrol_topology.txt")
    if arguments[:1] == ["update"]:
        return _update([" ".join(arguments)], True, recorded, folder)
    lines = sys.stdin.read().splitlines()
    if arguments == ["-a", "-d", "-o"]:
        if lines != ["show node", "show partition", "show reservation", "version"]:
            fail(f"scontrol: this input was not recorded: {lines}")
        return recording(recorded, "scontrol_show.txt")
    if arguments:
        fail(f"scontrol: these arguments were not recorded: {arguments}")
    return _update(lines, False, recorded, folder)


def _update(lines: list[str], alone: bool, recorded: str, folder: str) -> bytes:
    """Knows the recorded jobs; refuses as scontrol does; notes what it would have written."""
    rows = recording(recorded, "squeue_comment.txt").split(f"\x1f{MARK}\n".encode())[:-1]
    records: dict[bytes, list[str]] = {}
    for row in rows:
        raw, name, _ = row.split(b"\x1f", 2)
        records.setdefault(raw, []).append(name.decode())
    ids = {names[0] if len(names) == 1 else _whole(names) for names in records.values()}
    failed = False
    for line in lines:
        word, _, rest = line.partition(" ")
        if word != "update":
            sys.stderr.write(f"invalid keyword: {word}\n")
            continue
        pairs = [part.partition("=") for part in rest.split()]
        unknown = [p for p in pairs if p[0].lower() not in _UPDATE_KEYWORDS.split()]
        failed = True
        if unknown:
            sys.stderr.write(f"Update of this parameter is not supported: {unknown[0][0]}\n")
            sys.stderr.write("Request aborted\n")
        elif pairs[0][2] not in ids:
            sys.stderr.write(f"Invalid job id specified for job {pairs[0][2]}\n")
        else:
            failed = False
            with open(f"{folder}/updates.log", "a") as log:
                log.write(line + "\n")
    if failed and alone:
        raise SystemExit(1)
    return b""


def _whole(names: list[str]) -> str:
    """The id of the record that these tasks of an array share; none of ours follow each other."""
    return f"{names[0].partition('_')[0]}_[{','.join(name.partition('_')[2] for name in names)}]"


def sacctmgr(arguments: list[str], recorded: str, _folder: str) -> bytes:
    known = {
        ("qos", f"format={_QOS}"): "qos",
        ("assoc", f"format={_ASSOC}", "cluster=ft"): "assoc",
        ("user", "slurm-ext", "format=User,AdminLevel"): "user",
    }
    name = known.get(tuple(arguments[2:]))
    if arguments[:2] != ["-nP", "show"] or name is None:
        fail(f"sacctmgr: these arguments were not recorded: {arguments}")
    return recording(recorded, f"sacctmgr_{name}.txt")


def identity(arguments: list[str], _recorded: str, _folder: str) -> bytes:
    return {"-un": b"slurm-ext\n", "-u": b"900\n"}[arguments[0]]


def sdiag(arguments: list[str], recorded: str, _folder: str) -> bytes:
    if arguments:
        fail(f"sdiag: these arguments were not recorded: {arguments}")
    return recording(recorded, "sdiag.txt")


_ANSWERS = {
    "squeue": squeue,
    "sprio": sprio,
    "scontrol": scontrol,
    "sacctmgr": sacctmgr,
    "sdiag": sdiag,
    "id": identity,
}
