"""How a prompt begins. No torch."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


def begun(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int] = ()) -> list[int]:
    """A prompt's tokens, behind what the tokenizer itself begins a text with: the BOS of Llama, Mistral and
    Gemma, nothing of SmolLM2's and Qwen's.

    Every text that the model was pretrained on begins so, and so do lm-eval's prompts and, for a tokenizer
    with such a BOS, the documents that are trained on and read whole: their separator is that BOS
    (`relinear.get.text.document_separator`). For other tokenizers the separator `<|endoftext|>` keeps
    documents apart that are packed into one sequence. It does not begin a prompt that stands alone, as in
    lm-eval: for SmolLM2-135M-Instruct pairs and needles were found as often, to their errors, with it and
    without.
    """
    return [*tokenizer("")["input_ids"], *tokens]
