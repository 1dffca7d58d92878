"""What the HTTP API takes and gives.

Requests are pydantic models with every field of OpenAI's, so that none is accepted and ignored: a
field that is not supported is refused by name unless it asks for what would happen anyway. Types
are checked here; ranges are those of `SamplingParams`, and checked there. null is "not given".

Answers are plain dicts, typed here: one is made for every token of every stream.
"""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,  # pydantic needs these before Python 3.12
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    model_validator,
)
from pydantic_core import core_schema
from typing_extensions import TypedDict

from shared.prompts import as_token_ids, split_prompts

Number = Annotated[float, Field(allow_inf_nan=False)]

# Bounds of lists and objects. What is beyond them is refused before it is looked at: checking a
# million wrong entries, one error each, would keep every stream waiting. Of a list that may be
# long, the first wrong entry is the only one that is told.
MAX_FIELDS = 100
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096  # and parts of one
MAX_STOPS = 128
MAX_BIASES = 1024


class Only:
    """Annotates a field of OpenAI's of which these values are supported, and null."""

    def __init__(self, *values: JsonValue) -> None:
        self.values = values

    def check(self, value: Any) -> Any:
        if value is None or any(type(v) is type(value) and v == value for v in self.values):
            return value
        if not self.values:
            raise ValueError("not supported")
        raise ValueError(f"supported: {' and '.join(map(repr, self.values))} only")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


def _as_list(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _not_too_many(value: object) -> object:
    """A dict's own max_length is looked at after all entries."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries, got {len(value)}")
    return value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"at most {MAX_PROMPTS} prompts, got {len(value)}")
    prompts = split_prompts(value)
    if not prompts:
        raise ValueError("there is nothing to continue")
    return [prompt if isinstance(prompt, str) else as_token_ids(prompt) for prompt in prompts]


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"at most {MAX_FIELDS} fields, got {len(value)}")
        return value


class ApiRequest(Strict):
    model: str | None = None
    """The served model's name; another one is a 404."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    """A last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk (vLLM's)."""
    include_obfuscation: Annotated[Any, Only(False)] = None


class GenerationRequest(ApiRequest):
    """What both endpoints share. Defaults are OpenAI's; the ranges are those of SamplingParams."""

    n: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number] | None, BeforeValidator(_not_too_many)] = None
    """Token ids (as texts, JSON has no others for keys) to what is added to their logits."""
    seed: int | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MAX_STOPS)],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    """Taken and not used: it tells OpenAI who asks, and changes no answer."""

    # vLLM's.
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    return_token_ids: bool | None = None
    """Give the token ids of prompt and completion as well as the text."""


# Fields that go into SamplingParams under the same name, when they are given.
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "max_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(
            _as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    """A text, a list of token ids, or a list of either."""
    echo: bool | None = None
    """Put the prompt in front of the text, and of the logprobs."""
    logprobs: int | None = None
    """Log probabilities of every token and of this many most probable ones in its place."""
    add_special_tokens: bool | None = None
    """vLLM's: whatever the tokenizer puts around a text (Qwen3: nothing). Default: true."""
    best_of: int | None = None
    """The same as n, if given."""
    suffix: Annotated[Any, Only()] = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    """developer is OpenAI's newer name for system."""
    content: Annotated[
        Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)],
        BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
    ]

    # What OpenAI's client sends back of an answer.
    refusal: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    tool_calls: Annotated[Any, Only([])] = None
    name: Annotated[Any, Only()] = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(GenerationRequest):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """This many most probable tokens in every place; needs logprobs."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens. Default: as many as fit."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables of the chat template, such as Qwen3's enable_thinking."""
    prompt_cache_key: str | None = None
    """Taken and not used, as user: equal beginnings are found without it."""
    safety_identifier: str | None = None
    """Taken and not used, as user."""

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only("none")] = None
    functions: Annotated[Any, Only([])] = None
    metadata: Annotated[Any, Only()] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Annotated[Any, Only()] = None
    parallel_tool_calls: Annotated[Any, Only(True)] = None
    prediction: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt_cache_retention: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only()] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: Annotated[Any, Only(False)] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    tools: Annotated[Any, Only([])] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None


class TokenizeRequest(ApiRequest):
    """Either a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes its own."""
    add_generation_prompt: bool | None = None
    """Of messages: up to where the answer begins. Default: true."""
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ApiRequest):
    tokens: Annotated[list[int], Field(fail_fast=True)]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RequestTimes(TypedDict):
    """Seconds, measured in the server from when the request was there."""

    ttft: float | None
    """To the first token; null if only the prompt was scored."""
    tpot: float | None
    """From a completion's first token to its last, for each after the first; mean over completions,
    null if none has two tokens."""
    total_time: float


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length"]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionResponse(TypedDict):
    """Also every chunk of a stream, which may lack usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[RequestTimes]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class ChatResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestTimes


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(TypedDict):
    prompt: str


class Status(TypedDict):
    status: Literal["ok"]


class EngineHealth(TypedDict):
    engine: int
    alive: bool
    restarts: int


class Health(TypedDict):
    status: Literal["ok", "degraded"]
    """degraded: at least one engine is not alive."""
    engines: list[EngineHealth]


class Version(TypedDict):
    version: str
