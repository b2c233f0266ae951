"""What public programs with a Trainer do, each written anew in a few lines: it goes over."""

import pytest
import torch

import phalanx
from phalanx.integrations import transformers as converter
from tests.integrations.jobs import MARKS

pytestmark = MARKS
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def tokenizer():
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(35))])}
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), **names)


def bert(head, **more):
    import transformers

    model = getattr(transformers, f"BertFor{head}")
    return lambda: model(transformers.BertConfig(**SMALL, **more))


def gpt2():
    import transformers

    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 2, "eos_token_id": 3}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, **shape))


def t5():
    import transformers

    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=40, decoder_start_token_id=0, pad_token_id=0, **shape)
    )


def vit():
    import transformers

    shape = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape))


def ids(number, length):
    return torch.randint(5, 40, (length,), generator=torch.Generator().manual_seed(number)).tolist()


def texts(**labels):
    """Samples of unlike lengths as lists, with a column that no model takes."""
    made = []
    for number in range(12):
        tokens = ids(number, 3 + number % 5)
        each = {name: label(number, tokens) for name, label in labels.items()}
        made.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "text": f"line {number}", **each})
    return made


def collator(kind, *more, **options):
    import transformers

    return getattr(transformers, kind)(tokenizer(), *more, **options)


class Images(torch.utils.data.Dataset):
    """Images that are flipped at random."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": image.flip(2) if torch.rand(()) < 0.5 else image, "label": index % 2}


def lines():
    """A stream of blocks of tokens."""
    for number in range(24):
        yield {"input_ids": ids(number, 8), "labels": ids(number, 8)}


def right(predicted):
    return {"right": (predicted.predictions.argmax(-1) == predicted.label_ids)[predicted.label_ids != -100].mean()}


def both_ends(predicted):
    starts, ends = (logits.argmax(-1) == labels for logits, labels in zip(*predicted, strict=True))
    return {"right": (starts & ends).mean()}


def distance(predicted):
    return {"distance": abs(predicted.predictions[:, 0] - predicted.label_ids).mean()}


def sentences():
    return bert("SequenceClassification", num_labels=3), texts(label=lambda number, _: number % 3), right, {}


def similarity():
    return bert("SequenceClassification", num_labels=1), texts(label=lambda number, _: number / 12), distance, {}


def entities():
    data = texts(labels=lambda _, tokens: [-100, *(token % 3 for token in tokens[1:])])
    made = {"data_collator": collator("DataCollatorForTokenClassification")}
    return bert("TokenClassification", num_labels=3), data, right, made


def answers():
    data = texts(start_positions=lambda number, _: number % 3, end_positions=lambda number, _: number % 3)
    return bert("QuestionAnswering"), data, both_ends, {}


def choices():
    data = [{"input_ids": [ids(number, 6), ids(-number, 6)], "label": number % 2} for number in range(1, 13)]
    return bert("MultipleChoice"), data, right, {"data_collator": None}


def pretraining():
    data = [{"input_ids": ids(number, 8), "labels": ids(number, 8)} for number in range(12)]
    return gpt2, data, None, {"data_collator": None}


def masks():
    return bert("MaskedLM"), texts(), None, {"data_collator": collator("DataCollatorForLanguageModeling")}


def summaries():
    data = texts(labels=lambda _, tokens: tokens[:3])
    return t5, data, None, {"data_collator": collator("DataCollatorForSeq2Seq", t5())}


def images():
    return vit, Images(), right, {"data_collator": None}


def stream():
    return gpt2, phalanx.Stream(lines), None, {"data_collator": None}


GO_OVER = {
    "sentences": (sentences, {"learning_rate": 2e-5, "weight_decay": 0.01}),
    "similarity of two sentences": (similarity, {"warmup_steps": 0.1}),
    "entities": (entities, {"per_device_eval_batch_size": 3}),
    "answers in a text": (answers, {"max_grad_norm": 0.5}),
    "multiple choice": (choices, {"gradient_accumulation_steps": 2}),
    "language model": (pretraining, {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}),
    "masked language model": (masks, {"optim": "adafactor"}),
    "summaries": (summaries, {"label_smoothing_factor": 0.1}),
    "images": (images, {"remove_unused_columns": False, "dataloader_num_workers": 2}),
    "a stream": (stream, {"max_steps": 5}),
}


@pytest.mark.parametrize("program", GO_OVER)
def test_programs_go_over(program, tmp_path):
    """In one line; what was trained is saved as always, and two runs have the same bits."""
    import transformers

    made, more = GO_OVER[program]
    make_model, data, compute, given = made()
    given = {"data_collator": collator("DataCollatorWithPadding"), **given}
    strategy = "no" if isinstance(data, phalanx.Stream) else "epoch"
    usual = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "eval_strategy": strategy, "logging_steps": 5}
    args = transformers.TrainingArguments("out", use_cpu=True, report_to="none", **(usual | more))
    held_out = None if strategy == "no" else data
    recipe, evaluation = converter.recipe(
        make_model, args, data, **given, eval_dataset=held_out, compute_metrics=compute
    )
    result = recipe.train(engine="inline", evaluation=evaluation)
    assert result.digest == recipe.train(engine="inline", readers=0).digest
    names = {item.name.removeprefix("eval/") for item in result.metric_history}
    assert names - {"loss"} == ({compute.__name__} if compute in (right, distance) else {"right"} if compute else set())
    assert "loss" in names or evaluation is None
    result.model.save_pretrained(tmp_path)
    assert phalanx.digest(type(result.model).from_pretrained(tmp_path)) == phalanx.digest(result.model)
