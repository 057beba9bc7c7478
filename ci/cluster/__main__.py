"""Command line for people: `ci/slurm up|list|enter|exec|logs|install|down|image`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence

from ci.cluster import engine, image, registry
from ci.cluster.daemon import LOG, start_daemon
from ci.cluster.errors import ClusterError
from ci.cluster.harness import Cluster
from ci.cluster.spec import CONTROLLER, ClusterSpec, ConfValue, default_suite


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` belongs to the command that `exec` runs; argparse would mix it with our own
    # options.
    cut = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:cut], argparse.Namespace(argv=words[cut + 1 :]))
    try:
        return int(args.run(args) or 0)
    except ClusterError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ci/slurm", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a cluster that stays up, and print its name")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--gpus-per-node", type=int, default=4)
    up.add_argument("--nodes-per-container", type=int, default=4)
    up.add_argument(
        "--suite", default=default_suite(), help="Debian suite, which decides Slurm's release"
    )
    up.add_argument("--ranks", action="store_true", help="with torch and MPI in the image")
    up.add_argument("--prefix", default="slurm-ext", help="first part of the cluster's name")
    up.add_argument("--limits", action="store_true", help="enforce associations, QOS and limits")
    up.add_argument("--no-plugin", action="store_true", help="leave out the SPANK plugin")
    up.add_argument("--no-lua", action="store_true", help="leave out site/*.lua")
    up.add_argument("--product", action="store_true", help="install the Python package too")
    up.add_argument(
        "--daemon",
        action="store_true",
        help="install it and start the helper daemon, acting, with the starter table",
    )
    up.add_argument(
        "-c",
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="key of slurm.conf; an empty value drops it, a repeated key gives several lines",
    )
    up.set_defaults(run=_up)

    listing = commands.add_parser("list", help="names of running clusters and how to enter them")
    listing.set_defaults(run=_list)

    enter = commands.add_parser("enter", help="open a shell in a cluster")
    enter.add_argument("name")
    enter.add_argument("-u", "--user", default="root")
    enter.add_argument("-n", "--container", default=CONTROLLER, help="ctl, c1, c2, ...")
    enter.set_defaults(run=_enter)

    run = commands.add_parser(
        "exec", help="run one command in a cluster: exec NAME [options] -- COMMAND"
    )
    run.add_argument("name")
    run.add_argument("-u", "--user", default="root")
    run.add_argument("-n", "--container", default=CONTROLLER, help="ctl, c1, c2, ...")
    run.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    run.set_defaults(run=_exec)

    logs = commands.add_parser("logs", help="last lines of a container's output and Slurm's logs")
    logs.add_argument("name")
    logs.add_argument("-n", "--container", default=CONTROLLER, help="ctl, c1, c2, ...")
    logs.add_argument("--lines", type=int, default=60)
    logs.set_defaults(run=_logs)

    install = commands.add_parser("install", help="install the Python package of this tree anew")
    install.add_argument("name")
    install.set_defaults(run=_install)

    down = commands.add_parser("down", help="remove clusters entirely")
    what = down.add_mutually_exclusive_group(required=True)
    what.add_argument("names", nargs="*", default=[], metavar="NAME")
    what.add_argument("--all", action="store_true", help="every cluster, whoever started it")
    what.add_argument("--stale", action="store_true", help="those whose owner is dead")
    down.set_defaults(run=_down)

    build = commands.add_parser("image", help="make the image if it is missing, and print its tag")
    build.add_argument("--suite", default=default_suite())
    build.add_argument("--ranks", action="store_true", help="with torch and MPI")
    build.set_defaults(run=_image)
    return parser


def _up(args: argparse.Namespace) -> None:
    slurm_conf: dict[str, ConfValue] = {}
    for item in args.conf:
        key, _, value = item.partition("=")
        known = slurm_conf.get(key)
        if not value:
            slurm_conf[key] = None
        elif known is None:
            slurm_conf[key] = value
        else:
            slurm_conf[key] = [*(known if isinstance(known, list) else [known]), value]
    spec = ClusterSpec(
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        nodes_per_container=args.nodes_per_container,
        suite=args.suite,
        ranks=args.ranks,
        name_prefix=args.prefix,
        plugin=not args.no_plugin,
        lua=not args.no_lua,
        limits=args.limits,
        slurm_conf=slurm_conf,
    )
    started = time.monotonic()
    cluster = Cluster.start(spec, keep=True, progress=_say)
    if args.product or args.daemon:
        cluster.install_product()
    if args.daemon:
        start_daemon(cluster)
        _say(f"the daemon acts in main and preempt; its log: {LOG}")
    _say(f"up in {time.monotonic() - started:.1f} s; enter it with")
    _say(f"  ci/slurm enter {cluster.name} -u alice")
    print(cluster.name)


def _list(_: argparse.Namespace) -> None:
    for name, owner in registry.running().items():
        print(f"{name}\towner={owner}\tci/slurm enter {name} -u alice")


def _enter(args: argparse.Namespace) -> None:
    docker = shutil.which("docker")
    if docker is None:
        raise ClusterError("`enter` needs the docker command; use `exec`, or install docker-cli")
    Cluster.attach(args.name)
    target = f"{args.name}-{args.container}"
    home = "/root" if args.user == "root" else f"/home/{args.user}"
    command = [docker, "exec", "-it", "-u", args.user, "-w", home, target, "bash", "-l"]
    os.execv(docker, command)


def _exec(args: argparse.Namespace) -> int:
    if not args.argv:
        raise ClusterError("exec: give a command, e.g. `exec NAME -u alice -- squeue`")
    cluster = Cluster.attach(args.name)
    done = cluster.exec(
        args.argv, user=args.user, container=args.container, check=False, timeout=args.timeout
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.rc


def _logs(args: argparse.Namespace) -> None:
    print(Cluster.attach(args.name).logs(args.container, args.lines))


def _install(args: argparse.Namespace) -> None:
    Cluster.attach(args.name).install_product()


def _down(args: argparse.Namespace) -> None:
    client = engine.connect()
    if args.stale:
        names = registry.sweep(client)
    else:
        names = list(registry.running(client)) if args.all else args.names
        unknown = set(names) - set(registry.running(client))
        if unknown:
            raise ClusterError(f"no cluster is called {', '.join(sorted(unknown))}")
        for name in names:
            registry.remove(client, name)
    _say(f"removed {', '.join(names) or 'nothing'}")


def _image(args: argparse.Namespace) -> None:
    print(image.ensure_image(engine.connect(), args.suite, _say, ranks=args.ranks))


if __name__ == "__main__":
    sys.exit(main())
