"""Packed rows: what a document gives does not depend on what stands beside it in its row."""

import pytest
import torch
from test_laws import CASES, FIRST, TEACHERS, close, linearized, name, of, over_pairs, teacher, tokens
from transformers import DataCollatorWithFlattening

from relinear.linearize.transfer import record

LENGTHS = (7, 1, 33, 16, 9, 64, 5)  # around the windows, and a document of one token


def pack(lengths=LENGTHS, seed=0):
    """Documents ``[1, n]`` of these lengths, one row of them all, and its positions."""
    texts = [tokens(n, batch=1, seed=seed + i) for i, n in enumerate(lengths)]
    return texts, torch.cat(texts, 1), torch.cat([torch.arange(n) for n in lengths])[None]


@over_pairs
def test_a_document_in_a_packed_row_is_what_it_is_alone(case, family):
    model, (texts, row, positions) = of(case, family=family), pack()
    alone = torch.cat([model(text, use_cache=False).logits for text in texts], 1)
    close(model(row, position_ids=positions).logits, alone)
    close(model(row, position_ids=positions, use_cache=False).logits, alone)


@pytest.mark.parametrize("family", TEACHERS)
def test_the_teacher_means_the_same_by_a_packed_row(family):
    _, row, positions = pack()
    close(
        linearized("softmax", (), family=family)(row, position_ids=positions).logits,
        teacher(family)(row, position_ids=positions, use_cache=False).logits,
    )


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_what_a_collator_for_packed_rows_makes_is_read_whole_or_in_part(case):
    model, (texts, row, _) = of(case), pack()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    made = dict(collate([{"input_ids": text[0].tolist()} for text in texts]))
    assert {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "seq_idx"} <= made.keys()
    alone = [model(text, labels=text, use_cache=False) for text in texts]
    out = model(**made)
    close(out.logits, torch.cat([one.logits for one in alone], 1))
    weights = torch.tensor([float(text.shape[1] - 1) for text in texts])
    losses = torch.stack([one.loss if n else torch.zeros(()) for one, n in zip(alone, weights, strict=True)])
    close(out.loss, (losses * weights).sum() / weights.sum())
    for given in ({"cu_seq_lens_q": made["cu_seq_lens_q"]}, {"seq_idx": made["seq_idx"]}):
        close(model(row, **given).logits, out.logits)


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_several_packed_rows_of_a_batch(case):
    model, (one, first, at), (two, second, there) = of(case), pack((20, 31)), pack((11, 3, 37), seed=50)
    alone = [torch.cat([model(text, use_cache=False).logits for text in texts], 1) for texts in (one, two)]
    close(model(torch.cat([first, second]), position_ids=torch.cat([at, there])).logits, torch.cat(alone))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_gradients_of_a_packed_row_are_those_of_its_documents(case):
    model, (texts, row, positions) = of(case), pack((9, 18, 6))
    embedding = model.get_input_embeddings()

    def gradient(parts, **given):
        inputs = [embedding(part).detach().requires_grad_() for part in parts]
        sum(model(inputs_embeds=x, use_cache=False, **given).logits.square().sum() for x in inputs).backward()
        return torch.cat([x.grad for x in inputs], 1)

    close(gradient([row], position_ids=positions), gradient(texts))


def test_the_transfer_s_inputs_of_a_packed_row_are_the_teacher_s():
    model, (texts, row, positions) = of(("hedgehog", {})), pack((9, 18))
    for packed, *alone in zip(
        record(model, row, position_ids=positions), *(record(model, text) for text in texts), strict=True
    ):
        close(packed, torch.cat(alone, 1))


REFUSED = {
    "a state": (
        {"position_ids": [0, 1, 0, 1, 2], "use_cache": True},
        "2 documents in 1 rows where a state is kept.*possible: .*without a cache",
    ),
    "a mask beside seq_idx": (
        {"seq_idx": [0, 0, 1, 1, 1], "attention_mask": [1] * 5},
        "seq_idx together with attention_mask; possible",
    ),
    "a mask beside positions": (
        {"position_ids": [0, 1, 0, 1, 2], "attention_mask": [1] * 5},
        "do not go up by one at token 2 of row 0.*possible",
    ),
    "two that disagree": (
        {"position_ids": [0, 1, 0, 1, 2], "seq_idx": [0, 0, 0, 1, 1]},
        r"seq_idx .* begin at \[0, 3\] and position_ids .* \[0, 2\].*disagree",
    ),
    "ends beyond the row": (
        {"cu_seq_lens_q": (0, 2, 6)},
        r"cu_seq_lens_q must rise from 0 to the number of tokens, 5; got \[0, 2, 6\]",
    ),
    "ends that fall": ({"cu_seq_lens_q": (0, 3, 2, 5)}, r"cu_seq_lens_q must rise .* got \[0, 3, 2, 5\]"),
    "queries' and keys' ends": (
        {"cu_seq_lens_q": (0, 2, 5), "cu_seq_lens_k": (0, 3, 5)},
        "cu_seq_lens_q .*and cu_seq_lens_k .*disagree",
    ),
    "a longest document alone": ({"max_length_q": 3}, "max_length_q without cu_seq_lens_q.*possible"),
    "a seq_idx of another length": (
        {"seq_idx": [0, 0, 1]},
        r"seq_idx must be \[batch, tokens\] = \[1, 5\]; got \[1, 3\]",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_boundaries_that_cannot_be_honoured_are_refused(wrong):
    given, message = REFUSED[wrong]
    as_rows = {
        k: torch.tensor([v]) if isinstance(v, list) else torch.tensor(v) if isinstance(v, tuple) else v
        for k, v in given.items()
    }
    with pytest.raises(ValueError, match=message):
        of(("lolcats", {}))(tokens(5, batch=1), **as_rows)


def test_a_prompt_s_positions_that_begin_anew_beside_a_cache_are_refused():
    model = of(("lolcats", {}))
    with pytest.raises(ValueError, match="where a state is kept"):
        model(
            tokens(5, batch=1),
            position_ids=torch.tensor([[0, 1, 0, 1, 2]]),
            past_key_values=model.make_cache(),
        )
