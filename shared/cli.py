"""Command line entry points; a stage's `generate.py` is a call of `generate_main`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, get_args, get_origin

import msgspec
import pydantic
import tyro

from shared.config import EngineConfig
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.llm import OfflineLLM
    from shared.outputs import CompletionOutput, RequestOutput

EXIT_FAILED = 1  # a request ended with an error
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2  # SIGINT
EXIT_PIPE_CLOSED = 128 + 13  # SIGPIPE

DEFAULT_MAX_TOKENS = 64

# Of a flag's dataclass field: makes one value of all that was given.
COLLECT = "collect"


def generate_main(stage: str, argv: Sequence[str] | None = None) -> NoReturn:
    """`python -m steps.NN_x.generate`: complete prompts, then exit.

    Exit status: 0; 1 if a request failed; 2 with one line on stderr for wrong options, files or
    prompts; 130 after Ctrl-C; 141 if nobody reads stdout any more.
    """
    run_main(lambda: _generate(stage, sys.argv[1:] if argv is None else argv))


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run an entry point and exit with its status; expected failures end without a traceback."""
    # None where the caller has closed them (`>&-`). Not every library expects that.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no error
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter flushes it at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_PIPE_CLOSED
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        status = EXIT_USAGE
    sys.exit(status)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # for the rest of the process


def one_line(error: Exception) -> str:
    """What went wrong, without line breaks; for a validation error, which fields and why."""
    if isinstance(error, pydantic.ValidationError):
        details = []
        for entry in error.errors(include_url=False):
            where = ".".join(str(part) for part in entry["loc"])
            what = entry["msg"].removeprefix("Value error, ")
            details.append(f"{where}: {what}, got {entry['input']!r}" if where else what)
        return "; ".join(details)
    return " ".join(str(error).split()) or type(error).__name__


def flags_of(
    model: type[pydantic.BaseModel],
    title: str,
    renamed: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> type[Any]:
    """A plain dataclass with the model's fields, for tyro to make flags of.

    Plain, so that values are checked by the model itself (see `given`) and nowhere else. A field
    with a shorter spelling on the command line (max_model_length: --max-model-len) has both. A
    flag of several values may be repeated, and all its values count.
    """
    annotated: Any = Annotated  # for mypy: types made at run time are no types
    many: Any = tuple
    fields: list[tuple[str, Any, Any]] = []
    for name, info in model.model_fields.items():
        flag = (renamed or {}).get(name, name)
        default = (defaults or {}).get(name, info.get_default())
        described = tyro.conf.arg(
            help=" ".join((info.description or "").split()),
            aliases=[f"--{flag.replace('_', '-')}"] if _has_short_name(info.metadata) else None,
        )
        collect, item = _collection(info.annotation)
        if collect is None:
            kind = annotated[(info.annotation, *info.metadata, described)]
            field = dataclasses.field(default=default)
        else:
            # One group of values for each time the flag is given; none: the model's default.
            kind = annotated[many[many[item, ...], ...], described, tyro.conf.UseAppendAction]
            field = dataclasses.field(default=(), metadata={COLLECT: collect})
        fields.append((flag, kind, field))
    made = dataclasses.make_dataclass(title, fields)
    made.__doc__ = ""  # or the generated signature would be printed as the group's help
    return made


def given(flags: object) -> dict[str, Any]:
    """The flags that differ from their defaults, by field name."""
    values = {}
    for field in dataclasses.fields(flags):  # type: ignore[arg-type]
        value = getattr(flags, field.name)
        if value != field.default:
            collect = field.metadata.get(COLLECT)
            values[field.name] = collect(itertools.chain(*value)) if collect else value
    return values


def _collection(annotation: Any) -> tuple[Callable[[Any], Any] | None, Any]:
    """(tuple, T) for tuple[T, ...], (dict, pair) for a dict, None allowed besides; else nothing."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        arguments = get_args(kind)
        if get_origin(kind) is tuple and arguments[1:] == (...,):
            return tuple, arguments[0]
        if get_origin(kind) is dict:
            pair: Any = tuple
            return dict, pair[arguments]
    return None, None


def _has_short_name(metadata: Sequence[Any]) -> bool:
    return any(isinstance(entry, type(tyro.conf.arg())) for entry in metadata)


def _generate(stage: str, argv: Sequence[str]) -> int:
    # Here, not above: stages import this module.
    from steps import load

    package = load(stage)
    flags = _parse(stage, package.Config, argv)
    prompts = [prompt for group in flags.prompt for prompt in group]
    if not prompts:
        raise ValueError("there is nothing to do: give at least one --prompt")
    engine_options = given(flags.engine)
    config: EngineConfig = package.Config(**engine_options)
    params = _sampling_params(flags.sampling, config)
    if not flags.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("log probabilities are only shown with --json")
    with package.LLM(**engine_options) as llm:
        if len(prompts) == 1 and params.n == 1 and not flags.json:
            outputs = [_print_stream(llm, prompts[0], params, flags.chat)]
        else:
            outputs = _complete(llm, prompts, params, flags.chat)
            for output, prompt in zip(outputs, prompts, strict=True):
                print(_as_json(output) if flags.json else _as_text(output, prompt), flush=True)
        if not flags.json:
            print(_summary(outputs), file=sys.stderr)
    return _report_failures(outputs)


@dataclasses.dataclass
class _PromptFlags:
    prompt: Annotated[list[list[str]], tyro.conf.UseAppendAction] = dataclasses.field(
        default_factory=list
    )
    """Texts to complete: several after one flag, or one flag each."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Each prompt is a user's message, put through the model's chat template."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object per prompt and line, and nothing else, on stdout."""


def _parse(stage: str, config_class: type[EngineConfig], argv: Sequence[str]) -> Any:
    """_PromptFlags with `sampling` and `engine` besides; wrong flags exit with status 2."""
    sampling = flags_of(
        SamplingParams,
        "Sampling",
        renamed={"seed": "request_seed"},
        defaults={"max_tokens": DEFAULT_MAX_TOKENS},
    )
    groups: list[tuple[str, Any]] = [
        ("sampling", sampling),
        ("engine", flags_of(config_class, "Engine")),
    ]
    flags = dataclasses.make_dataclass("Flags", groups, bases=(_PromptFlags,), kw_only=True)
    return tyro.cli(
        flags,
        prog=f"python -m steps.{stage}.generate",
        description=f"Complete prompts with the engine of stage {stage}.",
        args=argv,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _sampling_params(flags: Any, config: EngineConfig) -> SamplingParams:
    """--seed seeds the engine and, unless --request-seed is given, every request as well.

    So the same command gives the same text whatever other prompts it has, and in every stage.
    """
    values = {"max_tokens": DEFAULT_MAX_TOKENS, "request_seed": config.seed, **given(flags)}
    return SamplingParams(seed=values.pop("request_seed"), **values)


def _complete(
    llm: OfflineLLM, prompts: list[str], params: SamplingParams, chat: bool
) -> list[RequestOutput]:
    if chat:
        return llm.chat([_user_says(prompt) for prompt in prompts], params)
    return llm.generate(prompts, params)


def _print_stream(
    llm: OfflineLLM, prompt: str, params: SamplingParams, chat: bool
) -> RequestOutput:
    text = llm.render_chat(_user_says(prompt)) if chat else prompt
    stream = llm.generate_stream(text, params, add_special_tokens=not chat)
    for piece in stream:
        print(piece, end="", flush=True)
    print(flush=True)
    return stream.output


def _user_says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _as_json(output: RequestOutput) -> str:
    """The first completion's fields, and all completions under "outputs" when there are several."""
    record = {"prompt_token_ids": output.prompt_token_ids, **_completion(output.outputs[0])}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = output.prompt_logprobs
    if len(output.outputs) > 1:
        record["outputs"] = [_completion(completion) for completion in output.outputs]
    # By way of msgspec, which knows the logprobs and writes null for what JSON has no number for.
    # json.dumps escapes what is not ASCII, so that no terminal's encoding can spoil it.
    return json.dumps(msgspec.json.decode(msgspec.json.encode(record)))


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = completion.logprobs
    return record


def _as_text(output: RequestOutput, prompt: str) -> str:
    title = f"=== {prompt}"
    if len(output.outputs) == 1:
        return f"{title}\n{output.text}\n"
    parts = [f"--- {completion.index}\n{completion.text}\n" for completion in output.outputs]
    return "\n".join([title, *parts])


def _summary(outputs: Sequence[RequestOutput]) -> str:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    metrics = [output.metrics for output in outputs]
    start = min(m.arrival_time for m in metrics)
    seconds = max(m.finished_time or start for m in metrics) - start
    first = [m.first_token_time - start for m in metrics if m.first_token_time is not None]
    parts = [f"{num_prompt} prompt tokens", f"{num_output} output tokens"]
    if first and seconds > 0:
        parts.append(f"first token after {min(first) * 1e3:.0f} ms")
        parts.append(f"{num_output / seconds:.1f} tokens/s")
    return ", ".join(parts)


def _report_failures(outputs: Sequence[RequestOutput]) -> int:
    failed = [
        (position, completion.error)
        for position, output in enumerate(outputs)
        for completion in output.outputs
        if completion.error is not None
    ]
    for position, error in failed:
        print(f"error: prompt {position}: {error}", file=sys.stderr)
    return EXIT_FAILED if failed else 0
