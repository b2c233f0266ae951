"""Small models of transformers, data for them, and the arguments of their Trainer.

Importing transformers takes seconds, so it is imported where it is used.
"""

import importlib.util

import pytest
import torch

from phalanx.integrations import transformers as converter

MARKS = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
WORDS, LENGTH = 31, 12
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2_with_dropout(**more):
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **more))


def gpt2():
    return gpt2_with_dropout(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))


def llama():
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_hidden_layers=1))


def bert(kind="BertForSequenceClassification", **more):
    import transformers

    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**SMALL, num_hidden_layers=1, max_position_embeddings=16, **rates, **more)
    return getattr(transformers, kind)(config)


def classifier():
    return bert(num_labels=3)


def regressor():
    return bert(num_labels=1)


def masked():
    return bert("BertForMaskedLM")


def partly_frozen():
    model = classifier()
    model.bert.embeddings.requires_grad_(False)
    return model


def seq2seq():
    import transformers

    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **shape)
    return transformers.T5ForConditionalGeneration(config)


def rows(count=22, label=None):
    """Samples of unlike numbers of tokens, padded; ``label``: one for each, in place of tokens."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (), generator=generator)).long()
        labels = {"labels": ids.where(mask > 0, -100)} if label is None else {"label": label(number)}
        found.append({"input_ids": ids, "attention_mask": mask, "source": f"line {number}", **labels})
    return found


def words():
    return rows()


def classes():
    return rows(label=lambda number: number % 3)


def numbers():
    return rows(label=lambda number: number / 10)


def sources():
    return [{name: row[name] for name in ("input_ids", "labels")} for row in rows()]


def cut(samples):
    """A collator that pads to the longest sample of the batch only."""
    longest = max(int(sample["attention_mask"].sum()) for sample in samples)
    return {name: torch.stack([sample[name][:longest] for sample in samples]) for name in samples[0]}


def arguments(**more):
    import transformers

    usual = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return transformers.TrainingArguments("out", use_cpu=True, **(usual | quiet | {"num_train_epochs": 2} | more))


def here(make_model, data, args, **more):
    recipe, evaluation = converter.recipe(make_model, args, data, **more)
    return recipe.train(engine="inline", evaluation=evaluation)
