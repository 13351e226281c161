"""Write a model that answers by a script, with real tool calls, from seven megabytes of weights.

Each token of the script has a dimension of its own, in which the one before it points: there is no
attention and nothing to train. The chat template is a published family's with an end of our own: by
what the prompt says it writes a first token, which begins one of the replies. Of a call the
server's grammar writes the form; the model names a tool and its argument, where it has the choice.

usage: python -m tests.worlds.scripted_model FOLDER [STYLE [MAX_MODEL_LEN]]
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "tests" / "chat_templates"
STYLES = {"qwen": "<tool_call>", "mistral": "[TOOL_CALLS]", "gemma": "<tool_call>"}
"""Templates that are served here, and how a call begins; the last two insist on turns."""
MARK = "tool-42-ran"
"""What a tool prints: no prompt has it before a tool has run."""
COMMAND = "echo tool-$((40+2))-ran | tee mark.txt"
DONE = "The tool has answered, so this is the last reply of the scripted model."
TOOLS = ("Bash", "bash", "exec_command", "shell_command", "run_shell_command", "run_command")
"""Of Claude Code, opencode, Codex, Qwen Code and our own requests: tools that are called."""
KEYS = ("command", "cmd")
"""What their argument may be called."""
END, LEAST_PIECE, WIDTH, VOCABULARY = "<|im_end|>", 6, 128, 6000
SURE, LIKELY, POSSIBLE, LAST, LEAST = 12.0, 10.0, 8.0, 6.0, 4.0
"""How strongly a token is said: of each pair the second is not drawn at any usual temperature."""


def replies() -> dict[str, str]:
    """The script: what is said after each first token."""
    return {
        "hello": "Hello, says the scripted model, whatever it is asked.",
        "done": DONE,
        "file": f"mark.txt\n```\n{MARK}\n```",  # what aider takes for a new file
    }


def template(style: str) -> str:
    """A family's template, and an end that picks the reply by the prompt that it has written."""
    has_tool = " or ".join(f"""'"name": "{name}"' in prompt""" for name in TOOLS)
    return (
        f"{{%- set prompt %}}{(TEMPLATES / f'{style}.jinja').read_text()}{{%- endset %}}"
        "{{- prompt }}{%- if add_generation_prompt %}"
        f"{{%- if '{MARK}' in prompt %}}{{{{- '<|say:done|>' }}}}"
        "{%- elif 'file listing' in prompt %}{{- '<|say:file|>' }}"
        f"{{%- elif {has_tool} %}}{{{{- '<|say:call|>' }}}}"
        "{%- else %}{{- '<|say:hello|>' }}{%- endif %}{%- endif %}"
    )


def pieces(text: str, taken: set[str]) -> list[str]:
    """Cut a text into pieces of which no reply has another, and take them."""
    cut: list[str] = []
    while text:
        size = LEAST_PIECE
        while text[:size] in taken and size < len(text):
            size += 1
        piece, text = text[:size], text[size:]
        while piece in taken:  # the end of another reply, too
            piece = cut.pop() + piece
        cut.append(piece)
        taken.add(piece)
    return cut


class Script:
    """A tokenizer of the project's own prose, with the script's pieces beside it."""

    def __init__(self, style: str) -> None:
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        prose = sorted(str(path) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
        )
        trained.train(prose, trainer)
        parts = json.loads(trained.to_str())
        self._vocab: dict[str, int] = parts["model"]["vocab"]
        texts = {trained.decode([index]) for index in self._vocab.values()}
        self.chains = {name: pieces(text, texts) for name, text in replies().items()}
        self.command = pieces(COMMAND, texts)
        for piece in (*itertools.chain(*self.chains.values()), *self.command, *TOOLS, *KEYS):
            # no merge makes it, so prompts never have it
            self._vocab.setdefault(self._as_bytes(piece), len(self._vocab))
        self.tokenizer = Tokenizer.from_str(json.dumps(parts))
        self.chains["call"] = [STYLES[style]]
        marks = [END, "<s>", "</s>", *(f"<|say:{name}|>" for name in self.chains)]
        marks += self.chains["call"]
        self.tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        self.num_tokens = -(-self.tokenizer.get_vocab_size() // 64) * 64

    @staticmethod
    def _as_bytes(text: str) -> str:
        way = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return way.pre_tokenize_str(text)[0][0]

    def id_of(self, text: str) -> int:
        """A token by its text, or by its name if it is special."""
        found = self.tokenizer.token_to_id(text)
        return self._vocab[self._as_bytes(text)] if found is None else found

    def embedding_and_head(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each token points, and what is said there; all point a little to the end."""
        embedding = np.zeros((self.num_tokens, WIDTH), np.float32)
        head = np.zeros((self.num_tokens, WIDTH), np.float32)
        embedding[:, 0], head[self.id_of(END), 0] = 0.2, SURE
        for text in (">", "]"):  # with which a call ends
            head[self.id_of(text), 0] = LAST
        quoted, between, *free = range(1, WIDTH)
        said = {self._as_bytes(piece) for piece in itertools.chain(*self.chains.values())}
        said.update(map(self._as_bytes, self.command))
        for token, index in self._vocab.items():
            if token in said:
                continue  # a piece that ends with a blank leads to the next piece alone
            if token.endswith('"'):
                embedding[index, quoted] = 1
            elif token[-1] in "Ġ:{,[" or token in map(self._as_bytes, (*TOOLS, *KEYS)):
                embedding[index, between] = 1
        for text, strength in (
            *((key, LIKELY) for key in KEYS),
            *((name, POSSIBLE) for name in TOOLS),
            ("}", LAST),
            (":", LEAST),
            (",", LEAST),
        ):
            head[self.id_of(text), quoted] = strength
        head[self.id_of(self.command[0]), quoted] = SURE
        head[self.id_of('"'), between] = head[self.id_of(' "'), between] = LIKELY
        chains = [[f"<|say:{name}|>", *chain, END] for name, chain in self.chains.items()]
        for chain in (*chains, [*self.command, '"']):
            for token, following in itertools.pairwise(map(self.id_of, chain)):
                if following == self.id_of(END):
                    continue  # which all point to
                dimension = free.pop()
                embedding[token, dimension] = 1
                head[following, dimension] = SURE
        return embedding, head


def write(folder: Path, style: str = "qwen", max_model_len: int = 32768) -> Path:
    """Write the model's folder, as a hub would have it."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Script(style)
    embedding, head = script.embedding_and_head()
    layer = "model.layers.0"
    parts = [f"self_attn.{one}_proj" for one in "qkvo"]
    parts += [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    nothing = np.zeros((WIDTH, WIDTH), np.float32)
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        **{f"{layer}.{part}.weight": nothing.copy() for part in parts},
        **{f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms},
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    script.tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
        "vocab_size": script.num_tokens,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": max_model_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": script.id_of(END),
    }
    about = {"bos_token": "<s>", "eos_token": END, "chat_template": template(style)}
    for name, content in (("config.json", config), ("tokenizer_config.json", about)):
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:4]))
