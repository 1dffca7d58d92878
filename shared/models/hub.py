"""Where a model's files are: the bundled checkpoint, a directory, or the Hugging Face hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from shared.models.config import real_model_names

logger = logging.getLogger(__name__)

BUNDLED_CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "tiny"

# What loading reads; subfolders hold other formats of the same weights (onnx, original).
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
UNWANTED_FILES = ["*/*"]

# Seconds that a hub may be silent. Its client waits for ever for the answers to some requests.
HUB_TIMEOUT = 10.0


def resolve_model(model: str | None) -> Path:
    """The directory with the model's files, downloaded first when `model` is a hub id.

    None is the bundled checkpoint. What looks like a path is never looked up on the hub. Files
    come from `HF_ENDPOINT` and stay in the hub's own cache (`HF_HOME`).

    Raises FileNotFoundError if there is no such directory or model, or it cannot be fetched, and
    ValueError if `model` can be neither; both name `model`.
    """
    if model is None:
        return BUNDLED_CHECKPOINT
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.isfile(path):
        raise ValueError(f"model {model!r} is a file; expected the directory that holds the model")
    if _looks_like_path(model):
        raise FileNotFoundError(f"model {model!r}: no such directory")
    if model in real_model_names():
        raise ValueError(
            f"model {model!r} is the name of a shape without weights: it needs load_format=dummy"
        )
    return _download(model)


def _looks_like_path(model: str) -> bool:
    # A hub id is a name or owner/name.
    return model.startswith((".", os.sep, "~")) or model.count(os.sep) > 1


def _download(model_id: str) -> Path:
    # Deferred: a local directory needs neither the library nor its HTTP client.
    from huggingface_hub import constants, errors, get_session, snapshot_download

    logger.info(
        "model %s: fetching from %s what is not in %s",
        model_id,
        constants.ENDPOINT,
        constants.HF_HUB_CACHE,
    )
    # snapshot_download has no argument for this, and its first request waits without limit.
    hooks = get_session().event_hooks["request"]
    if _limit_wait not in hooks:
        hooks.append(_limit_wait)
    try:
        path = snapshot_download(
            model_id, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES
        )
    except errors.HFValidationError as error:
        raise ValueError(
            f"model {model_id!r} is neither a directory nor a Hugging Face id: {error}"
        ) from error
    except errors.GatedRepoError as error:
        raise FileNotFoundError(
            f"model {model_id!r} is gated: accept its terms on its hub page, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"model {model_id!r} is neither a directory here nor on the hub (is it misspelled? "
            f"a private one needs HF_TOKEN)"
        ) from error
    except Exception as error:  # which HTTP client's errors come through depends on the version
        raise FileNotFoundError(
            f"model {model_id!r} could not be fetched from the hub and is not in the local cache "
            f"(network, HF_ENDPOINT, HF_HUB_OFFLINE?): {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error
    return Path(path)


def _limit_wait(request: Any) -> None:
    """A hook of the HTTP client: no phase (connect, read, ...) of any request without a limit."""
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        phase: HUB_TIMEOUT if limit is None else limit for phase, limit in limits.items()
    }


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
