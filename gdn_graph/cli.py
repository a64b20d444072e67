"""The command line: gdn-graph demo, doctor, build, generate, bench, serve-spec, serve-check."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Gated DeltaNet speculative decoding for MAX.",
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def main() -> None:
    """Runs the command line; a mistake is one line and exit status 2."""
    try:
        app()
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        print(f"gdn-graph: {error}", file=sys.stderr)
        sys.exit(2)


@app.command()
def demo(
    geometry: Annotated[
        str, typer.Option(help="qwen3.5-27b, qwen3-next or tiny: the heads and dims.")
    ] = "tiny",
    layers: Annotated[
        int, typer.Option(help="Layers in the graph; each adds to its compile time.")
    ] = 2,
    batch: Annotated[int, typer.Option(help="Requests.")] = 4,
    drafts: Annotated[int, typer.Option(help="Drafts a round, K.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of verify and commit.")] = 5,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16: the pools' dtype.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    key_heads: Annotated[int | None, typer.Option(help="Instead of the geometry's.")] = None,
    value_heads: Annotated[int | None, typer.Option(help="Instead of the geometry's.")] = None,
    key_head_dim: Annotated[int | None, typer.Option(help="Instead of the geometry's.")] = None,
    value_head_dim: Annotated[int | None, typer.Option(help="Instead of the geometry's.")] = None,
    conv_width: Annotated[int | None, typer.Option(help="Instead of the geometry's.")] = None,
    ring_len: Annotated[
        int | None, typer.Option(help="Instead of the geometry's, or drafts + 1 if longer.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run speculative rounds through one MAX graph and prove them equal to the plain ops.

    Exit status 0 only if every round is equal to the bit.
    """
    from .demo import Demo, DemoOptions, Round
    from .geometry import MODELS, STATE_DTYPES

    if geometry not in MODELS:
        raise ValueError(f"demo: geometry is {geometry!r}; need one of {', '.join(MODELS)}")
    dtypes = {d.name: d for d in STATE_DTYPES}
    if dtype not in dtypes:
        raise ValueError(f"demo: dtype is {dtype!r}; need one of {', '.join(dtypes)}")
    model = MODELS[geometry]
    free = {
        "num_key_heads": key_heads,
        "num_value_heads": value_heads,
        "key_head_dim": key_head_dim,
        "value_head_dim": value_head_dim,
        "conv_width": conv_width,
        "ring_len": ring_len or max(model.geometry.ring_len, drafts + 1),
    }
    given = {name: size for name, size in free.items() if size is not None}
    sizes = replace(model.geometry, **given, stride=None)
    options = DemoOptions(sizes, layers, batch, drafts, rounds, dtypes[dtype], seed)
    console = Console(stderr=as_json)
    done: list[Round] = []
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("starting", total=rounds)

        def say(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(f"{what} ...")

        run = Demo(options, say)
        say("speculative rounds")
        for result in run.run():
            done.append(result)
            progress.advance(task)
    equal = all(r.equal for r in done)
    g = options.geometry
    if as_json:
        _print_json(
            {
                "equal": equal,
                "geometry": {
                    "num_key_heads": g.num_key_heads,
                    "num_value_heads": g.num_value_heads,
                    "key_head_dim": g.key_head_dim,
                    "value_head_dim": g.value_head_dim,
                    "conv_width": g.conv_width,
                    "ring_len": g.ring_len,
                },
                "layers": layers,
                "dtype": dtype,
                "specification_layers": run.checked_layers,
                "rounds": [r.as_dict() for r in done],
            }
        )
    else:
        state_bytes = g.recurrent_state_bytes(layers, options.dtype)
        console.print(_rounds_table(done, options))
        console.print(
            f"ring {_size(g.ring_bytes(layers))} a request for {_size(state_bytes)} of "
            f"recurrent state; error from float64 on {run.checked_layers} of {layers} layers"
        )
        if equal:
            console.print(
                f"[bold green]EQUAL[/]: all {rounds} rounds of verify and fold equal the plain ops "
                "over the accepted tokens, bit for bit"
            )
        else:
            wrong = ", ".join(f"{r.number} ({', '.join(r.unequal)})" for r in done if not r.equal)
            console.print(f"[bold red]NOT EQUAL[/] in round {wrong}")
    raise typer.Exit(0 if equal else 1)


def _rounds_table(rounds: list[Any], options: Any) -> Table:
    g = options.geometry
    table = Table(
        title=f"{options.layers} layers, {options.batch} requests, {options.drafts} drafts\n"
        f"{g.num_key_heads} key and {g.num_value_heads} value heads of {g.key_head_dim} x "
        f"{g.value_head_dim}, {options.dtype.name} pools",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("round", justify="right")
    table.add_column("window")
    table.add_column("kept")
    for name in ("equal", "error", "verify", "fold", "moved", "snapshots"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rounds:
        table.add_row(
            str(r.number),
            " ".join(map(str, r.window)),
            " ".join(map(str, r.accepted)),
            "[green]yes[/]" if r.equal else "[red]no[/]",
            f"{r.error:.0e}",
            _time(r.verify_s),
            _time(r.fold_s),
            _size(r.bytes_moved),
            _size(r.snapshot_bytes),
        )
    return table


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what it looked at, what it found, and the fix if that is not good."""

    what: str
    found: str
    good: bool = True
    needed: bool = True
    fix: str = ""


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Show versions, devices and the kernel library, and what is missing with its fix.

    Exit status 1 if something that is needed is missing.
    """
    findings = list(_findings())
    good = all(f.good or not f.needed for f in findings)
    if as_json:
        _print_json({"good": good, "findings": [vars(f) for f in findings]})
    else:
        console = Console()
        table = Table(show_header=False, box=None)
        for f in findings:
            mark = "[green]ok[/]" if f.good else ("[red]no[/]" if f.needed else "[yellow]--[/]")
            table.add_row(mark, f.what, f.found, f.fix)
        console.print(table)
    raise typer.Exit(0 if good else 1)


def _findings() -> Any:
    from max.driver import accelerator_count

    from .library import CACHE_VARIABLE, cache_dir, compiler_version, library_path

    python = platform.python_version()
    modern = sys.version_info >= (3, 11)
    yield Finding("python", python, modern, fix="" if modern else "use Python 3.11 to 3.14")
    yield _version("gdn-graph", "")
    yield _version("max", "26.7.", fix="pip install 'max==26.7.*'")
    yield _version("numpy", "2.", fix="pip install 'numpy>=2'")
    yield Finding("compiler", f"mojo {compiler_version()}, brought by max")
    count = accelerator_count()
    yield Finding("devices", f"cpu ({os.cpu_count()} cores)" + (f", {count} gpu" if count else ""))
    path = library_path()
    if path.is_file():
        age = (time.time() - path.stat().st_mtime) / 3600
        yield Finding("kernel library", f"{path}, built {age:.1f} hours ago")
    else:
        yield Finding("kernel library", "not built yet: first use builds it, or gdn-graph build")
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    writable = os.access(folder, os.W_OK)
    fix = "" if writable else f"set {CACHE_VARIABLE} to a folder that can be written"
    yield Finding("cache folder", str(cache_dir()), writable, fix=fix)
    for extra, package, purpose in (
        ("serve", "fastapi", "max serve and MAX's own layers"),
        ("test", "hypothesis", "the tests"),
        ("gpu", "nvidia-cuda-nvcc", "the register report of the GPU kernels"),
        ("compare", "torch", "the libraries of gdn-graph bench"),
        ("bench", "matplotlib", "the plots of gdn-graph bench"),
    ):
        yield _version(
            package, "", needed=False, fix=f"pip install 'gdn-graph[{extra}]', for {purpose}"
        )


def _version(package: str, wanted: str, needed: bool = True, fix: str = "") -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, "not installed", False, needed, fix)
    good = version.startswith(wanted)
    return Finding(package, version, good, needed, "" if good else fix)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "The state folds, and ",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 64,
    drafts: Annotated[int, typer.Option(min=0, help="The most drafts of a step.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="A folder of config.json and *.safetensors instead.")
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode one token a step.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text on the CPU with a small model, its drafts looked up in the text so far.

    Without --weights the weights are random and the text is noise; speculation changes the number
    of steps, never the text.
    """
    from .generate import run

    run(
        prompt,
        max_new_tokens=max_new_tokens,
        drafts=0 if no_speculation else drafts,
        seed=seed,
        weights=weights,
        as_json=as_json,
    )


@app.command()
def build(as_json: JsonOption = False) -> None:
    """Compile the kernel library now rather than on first use."""
    from .library import kernel_library, library_path

    cached = library_path().is_file()
    start = time.perf_counter()
    path = kernel_library()
    seconds = time.perf_counter() - start
    if as_json:
        _print_json({"path": str(path), "seconds": seconds, "cached": cached})
    else:
        how = "was built already" if cached else f"built in {seconds:.1f} s"
        print(f"{path} {how}")


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute or two: ours and C at a few shapes.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every shape, and longer at each: an hour.")
    ] = False,
    peers: Annotated[
        str | None, typer.Option(help="Names or patterns, as in 'ours_*,c_rec'; see --list.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="Names or patterns, as in 't4-*,fold4-*'; see --list.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Of every peer. By default all CPUs.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Bursts of each peer at each shape.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Of a burst.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds a table may wait for a busy machine. By default 30."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Compare this checkout with that commit instead."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for CSV, JSON, Markdown and plots.")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Print the peers and shapes, and do nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time these ops against C, libraries and the machine's limits, interleaved in one run."""
    from .bench import command

    if quick and full:
        raise ValueError("bench: --quick and --full exclude each other")
    if show_list:
        command.show_list()
        return
    length = "quick" if quick else "full" if full else "default"
    options = command.options(length, peers, shapes, threads, rounds, seconds, wait)
    if against is None:
        command.run(options, out, as_json)
    else:
        command.run_against(against, options, out, as_json)


@app.command()
def serve_spec() -> None:
    """Print what max serve and max generate take after --custom-architectures."""
    from .serve import SPEC

    print(SPEC)


@app.command()
def serve_check(
    folder: Annotated[Path, typer.Argument(help="A Qwen3.5 checkpoint.")],
    device: Annotated[str, typer.Option(help="cpu, gpu or gpu:N.")] = "cpu",
    encoding: Annotated[
        str | None, typer.Option(help="By default float32 on a CPU, bfloat16 on a GPU.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens a request may take in all.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds the server may take to start.")] = 900,
    as_json: JsonOption = False,
) -> None:
    """Serve a checkpoint with max serve on these ops, ask it, and report how fast it answers."""
    try:
        from .serve.check import serve_check
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"serve-check: {error.name} is not installed; pip install 'gdn-graph[serve]'"
        ) from None

    with Console(stderr=as_json).status("max serve starts; the first time it compiles for minutes"):
        report = serve_check(
            folder,
            device=device,
            encoding=encoding,
            max_length=max_length,
            max_tokens=max_tokens,
            timeout_seconds=timeout,
        )
    if as_json:
        _print_json(vars(report))
        return
    print(f"startup            {report.startup_seconds:.1f} s")
    print(f"first token        {_time(report.first_token_seconds)}")
    print(f"tokens per second  {report.tokens_per_second:.1f}, over {report.tokens}")
    print(f"greedy text        {report.text!r}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
