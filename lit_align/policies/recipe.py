"""What a configuration says about a policy, and the model and tokenizer it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.lean import make_lean
from lit_align.logprobs import verify_head
from lit_align.policies.adapters import attach_lora
from lit_align.policies.loading import (
    check_dtype,
    checkpoint_activations,
    load_model,
    remove_dropout,
)
from lit_align.policies.source import locate, readable_errors

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class PolicyRecipe:
    """A policy that has not been loaded yet: small, comparable and picklable.

    Args:
        pretrained: "tiny" (bundled), a folder, a .gguf file, or an id on the model hub.
        dtype: of the weights: float32, bfloat16, float16, or auto (as the files say).
        attn_implementation: as transformers names it, such as sdpa or eager; None lets it choose.
        lora: keyword arguments of `peft.LoraConfig`; the reference is then the policy with its
            adapter disabled. None trains all weights.
        disable_dropout: set every dropout of the model to 0, as TRL does: with it on, the policy
            would differ from its reference before the first step. That of `lora` is left alone.
        gradient_checkpointing: compute activations again in the backward pass to save memory.
        lean: compute again what costs next to nothing, see `make_lean`: about half the memory for
            activations; float32 takes no longer, bf16 up to 6 % longer.
        trust_remote_code: run code that comes with the model; only for a source that you trust.
        revision: branch, tag or commit on the model hub.
        chat_template: a Jinja text, or the path of a file that holds one, in place of the
            tokenizer's own.
    """

    pretrained: str = "tiny"
    dtype: str = "float32"
    attn_implementation: str | None = None
    lora: Mapping[str, Any] | None = None
    disable_dropout: bool = True
    gradient_checkpointing: bool = False
    lean: bool = True
    trust_remote_code: bool = False
    revision: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.pretrained, PathLike):
            # A path is as good as its text, but checkpoints keep recipes as plain values.
            object.__setattr__(self, "pretrained", fspath(self.pretrained))
        if not isinstance(self.pretrained, str) or not self.pretrained:
            raise UserError(
                f"pretrained must be a folder, a .gguf file or a hub id, not {self.pretrained!r}"
            )
        if not isinstance(self.lora, Mapping | None):
            raise UserError(f"lora must be options of peft.LoraConfig or null, not {self.lora!r}")
        check_dtype(self.dtype)

    def model(self) -> "PreTrainedModel | PeftModel":
        """The model on the CPU, in eval mode, its adapter attached and its head verified.

        Raises:
            UserError: if it cannot be found or loaded, or its log-probs cannot be taken.
        """
        with readable_errors(self.pretrained):
            model = load_model(self._where(), self.dtype, self.attn_implementation)
        if self.disable_dropout:
            remove_dropout(model)
        if self.gradient_checkpointing:
            checkpoint_activations(model)
        if self.lora is not None:
            model = attach_lora(model, self.lora)
        if self.lean:
            make_lean(model)
        verify_head(model)
        return model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with a pad token and the chat template asked for; no token is added.

        Raises:
            UserError: if it cannot be found or loaded, or has no token to pad with.
        """
        with readable_errors(self.pretrained):
            tokenizer = AutoTokenizer.from_pretrained(**self._where())
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise UserError(
                    f"the tokenizer of '{self.pretrained}' has neither a pad nor an end token: "
                    "set one of them in its tokenizer_config.json"
                )
            tokenizer.pad_token = tokenizer.eos_token
        if self.chat_template is not None:
            tokenizer.chat_template = _template(self.chat_template)
        return tokenizer

    def _where(self) -> dict[str, Any]:
        """Arguments that model and tokenizer share."""
        revision = {} if self.revision is None else {"revision": self.revision}
        return {
            **locate(self.pretrained),
            **revision,
            "trust_remote_code": self.trust_remote_code,
        }


def _template(text_or_path: str) -> str:
    """The Jinja text itself, or what the named file holds."""
    if "{" in text_or_path:
        return text_or_path
    path = Path(text_or_path).expanduser()
    if not path.is_file():
        raise UserError(
            f"chat_template is neither a Jinja text (no brace in it) nor a file: '{text_or_path}' "
            f"(looked from {Path.cwd()})"
        )
    return path.read_text(encoding="utf-8")
