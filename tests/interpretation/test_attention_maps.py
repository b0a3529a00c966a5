"""What a model attends to: known attention gives known results, and relevance lies on the square to be found."""

import io
import re

import numpy as np
import pytest
import torch
from helpers import TINY, assert_equal, randomize_
from PIL import Image
from sklearn.decomposition import PCA
from torch.nn import functional as F
from transformers import ViTImageProcessor, pipeline

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from hf_vit_scratch.data.images import denormalize
from hf_vit_scratch.interpretation import attention_maps
from hf_vit_scratch.interpretation.attention_maps import (
    attention,
    class_attention,
    draw_position_similarity,
    over_patches,
    patch_filters,
    position_similarity,
    rollout,
)


def classifier(**fields):
    model = ViTScratchForImageClassification(ViTScratchConfig(**TINY | fields)).double()
    randomize_(model, 0.5)
    return model


@pytest.fixture
def pixels():
    return torch.randn(2, 3, 16, 24, dtype=torch.float64)


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_attention_is_the_same_whatever_the_implementation(implementation, pooling, pixels):
    model = classifier(pooling=pooling)
    model.set_attn_implementation("eager")
    expected = torch.stack(model.eval()(pixels, output_attentions=True).attentions, dim=1)
    model.set_attn_implementation(implementation)
    assert_equal(attention(model, pixels), expected)
    num_tokens = 12 + (pooling == "cls")
    assert expected.shape == (2, 2, 4, num_tokens, num_tokens)


def test_compiled_model_has_the_same_class_attention(pixels):
    model = classifier()

    compiled = torch.compile(model, backend="aot_eager")

    assert_equal(class_attention(compiled, pixels), class_attention(model, pixels))


@pytest.mark.parametrize("look", [attention, class_attention])
def test_configuration_that_asks_for_tuples_changes_nothing(look, pixels):
    model = classifier()
    expected = look(model, pixels)
    model.config.return_dict = False

    assert_equal(look(model, pixels), expected)


def test_the_model_is_only_set_to_evaluation_mode(pixels):
    model = classifier().train()
    model.set_attn_implementation("sdpa")
    attention(model, pixels)
    class_attention(model, pixels)
    with pytest.raises(ValueError, match="of the shape .batch, 3 channels"):
        attention(model, pixels[:, :1])
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_class_attention_has_its_gradients_in_inference_mode_too(pixels):
    model = classifier()
    expected = class_attention(model, pixels)
    with torch.inference_mode():
        assert_equal(class_attention(model, pixels), expected)
        made_here = pixels.clone()
    assert_equal(class_attention(model, made_here), expected)


def test_attention_of_half_precision_is_float32_and_of_an_encoder_too(pixels):
    model = ViTScratchModel(ViTScratchConfig(**TINY)).bfloat16()
    maps = attention(model, pixels)
    assert maps.dtype == torch.float32
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 4, 13), rtol=0, atol=0.02)


def test_rollout_of_a_model_that_attends_evenly_is_known(pixels):
    model = classifier(num_hidden_layers=3)
    for layer in model.vit.layers:
        for parameter in layer.attention.q_proj.parameters():
            torch.nn.init.zeros_(parameter)  # all scores are 0, so each token takes 1/13 of each
    # (I/2 + J/(2 N))^3, where J is full of ones: a part of 1/8 never left its token.
    expected = torch.full((13, 13), 7 / 8 / 13, dtype=torch.float64) + torch.eye(13, dtype=torch.float64) / 8
    assert_equal(rollout(attention(model, pixels)), expected.expand(2, -1, -1))


def test_rollout_follows_the_layers_from_the_first():
    # Layer 0: token 0 takes all of token 1, the others of themselves. Layer 1: token 2 takes all of token 0.
    first, second = torch.eye(3)[[1, 1, 2]], torch.eye(3)[[0, 1, 0]]
    attentions = torch.stack((first, second))[None, :, None].double()
    # By hand: token 0 is half itself and half 1; then token 2 is half itself, and half that.
    expected = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]]], dtype=torch.float64)
    assert_equal(rollout(attentions), expected)


def test_rollout_takes_the_mean_of_the_heads():
    attentions = torch.rand(2, 3, 4, 5, 5, dtype=torch.float64).softmax(-1)
    assert_equal(rollout(attentions), rollout(attentions.mean(2, keepdim=True)))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_class_attention_equals_the_paper_computed_with_hooks(pooling, pixels):
    model = classifier(pooling=pooling, use_cls_token=True).eval()
    model.set_attn_implementation("eager")
    kept, expected = [], []

    def keep(module, args, output):
        output[1].retain_grad()
        kept.append(output[1])

    hooks = [layer.attention.register_forward_hook(keep) for layer in model.vit.layers]
    for image in range(2):
        kept.clear()
        model(pixels[image : image + 1], output_attentions=True).logits[0, 3].backward()
        relevance = np.eye(13)
        for probs in kept:
            weighted = (probs.grad[0] * probs[0].detach()).numpy()
            relevance = relevance + np.maximum(weighted, 0).mean(0) @ relevance
        taken = relevance[0, 1:] if pooling == "cls" else (relevance - np.eye(13))[1:, 1:].mean(0)
        expected.append(torch.from_numpy(taken.reshape(4, 3)))
    for hook in hooks:
        hook.remove()
    assert_equal(class_attention(model, pixels, [3, 3]), torch.stack(expected))


def test_class_attention_is_of_the_predicted_class_by_default(pixels):
    model = classifier(pooling="mean")
    predicted = model.eval()(pixels).logits.argmax(-1)
    assert_equal(class_attention(model, pixels), class_attention(model, pixels, predicted))
    other = (predicted + 1) % 5
    assert (class_attention(model, pixels) - class_attention(model, pixels, other)).abs().max() > 1e-6


def test_class_attention_of_a_frozen_model_under_no_grad(pixels):
    model = classifier()
    expected = class_attention(model, pixels)
    model.requires_grad_(False)
    with torch.no_grad():
        assert_equal(class_attention(model, pixels), expected)


def test_one_class_id_is_for_all_images(pixels):
    model = classifier()

    assert_equal(class_attention(model, pixels, [2]), class_attention(model, pixels, [2] * len(pixels)))


@pytest.mark.parametrize("class_ids", [[0, 1, 2], [0, 5]])
def test_classes_that_do_not_exist_are_refused(class_ids, pixels):
    with pytest.raises(
        RuntimeError, match=r"out of bounds|expanded size of the tensor \(2\) must match the existing size \(3\)"
    ):
        class_attention(classifier(), pixels, class_ids)


COLORS = ([0], [1], [2], [0, 1], [0, 2], [1, 2])


def colored_squares(number):
    """Return images of noise with a bright square, their class (its color), and the patches that it covers."""
    images, where = 0.3 * torch.randn(number, 3, 32, 32), torch.zeros(number, 8, 8)
    labels = torch.randint(len(COLORS), (number,))
    for image, label, place, (top, left) in zip(images, labels, where, torch.randint(7, (number, 2)), strict=True):
        image[COLORS[label], 4 * top : 4 * top + 8, 4 * left : 4 * left + 8] += 3.0
        place[top : top + 2, left : left + 2] = 1
    return images, labels, where


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_class_attention_of_a_model_trained_to_find_a_square_lies_on_the_square(pooling):
    config = ViTScratchConfig(
        image_size=32, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        norm_first=True, pooling=pooling, num_labels=len(COLORS),
    )  # fmt: skip
    model = ViTScratchForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        images, labels, _ = colored_squares(32)
        model(images, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    images, labels, where = colored_squares(64)
    assert (model.eval()(images).logits.argmax(-1) == labels).float().mean() > 0.95
    maps = class_attention(model, images, labels)
    share = (maps * where).sum((1, 2)) / maps.sum((1, 2))
    assert share.mean() > 0.5, f"{share.mean():.2f} of the relevance, on 6% of the area"


def test_a_patch_takes_its_row_and_the_image_takes_the_row_of_its_vector():
    weights = torch.rand(2, 7, 7)
    with_class_token = over_patches(weights, (3, 2))
    torch.testing.assert_close(with_class_token[1, 2, 0], weights[1, 0, 1 + 4], rtol=0, atol=0)
    torch.testing.assert_close(over_patches(weights, (3, 2), (1, 1))[0, 2, 1], weights[0, 4, 6], rtol=0, atol=0)
    without = over_patches(weights[:, 1:, 1:], (3, 2))
    torch.testing.assert_close(without[0, 1, 0], weights[0, 1:, 3].mean())
    torch.testing.assert_close(over_patches(weights[:, 1:, 1:], (2, 3), (1, 0))[0, 0, 2], weights[0, 4, 3])


def test_the_image_takes_the_mean_of_the_patches_if_the_class_token_is_not_read():
    weights = torch.rand(2, 7, 7)
    torch.testing.assert_close(over_patches(weights, (3, 2), pooling="mean")[0, 1, 0], weights[0, 1:, 3].mean())


@pytest.mark.parametrize("patch", [(3, 0), (0, 2)])
def test_a_patch_outside_of_the_grid_is_refused(patch):
    with pytest.raises(IndexError, match="out of bounds"):
        over_patches(torch.rand(7, 7), (3, 2), patch)


@pytest.mark.parametrize("grid", [(3, 3), (2, 2)])
def test_a_grid_of_another_size_is_refused(grid):
    with pytest.raises(ValueError, match=r"grid \(.*\) does not fit 7 tokens. Use the model's config.grid_size."):
        over_patches(torch.rand(7, 7), grid)


@pytest.mark.parametrize("kind", ["learned", "sincos2d"])
def test_position_similarity_is_the_cosine_of_the_two_patches(kind):
    model = ViTScratchModel(ViTScratchConfig(**TINY, position_embedding_type=kind)).double()
    if kind == "learned":
        randomize_(model, 0.5)
    similarity = position_similarity(model)
    table = model.embeddings.position_embeddings[0].detach()
    expected = F.cosine_similarity(table[1 + 3 * 1 + 2], table[1 + 3 * 3 + 0], dim=0)
    assert similarity.shape == (4, 3, 4, 3)
    assert_equal(similarity[1, 2, 3, 0], expected)


@pytest.mark.parametrize(("side", "which"), [(16, "each patch"), (24, "one patch in every 2x2")])
def test_figure_of_position_similarity_says_which_patches_it_shows(side, which):
    figure = draw_position_similarity(torch.eye(side * side).view(side, side, side, side))
    assert " ".join(figure.get_suptitle().split()) == f"Position embeddings: one map for {which}, at its place"


def test_patch_filters_are_the_principal_components():
    model = classifier(hidden_size=64)
    weight = model.vit.embeddings.patch_embeddings.projection.weight.detach()
    expected = torch.from_numpy(PCA(5).fit(weight.flatten(1).numpy()).components_)
    found = patch_filters(model, 5)
    assert found.shape == (5, 3, 4, 8)
    signs = (found.flatten(1) * expected).sum(1, keepdim=True).sign()
    assert_equal(found.flatten(1), expected * signs)
    assert (found.flatten(1).amax(1) == found.flatten(1).abs().amax(1)).all()


def test_denormalize_returns_the_image_that_the_model_sees(photographs):
    image = photographs[0].resize((24, 16))
    processor = ViTImageProcessor(
        size={"height": 16, "width": 24}, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]
    )
    pixels = processor(images=image, return_tensors="pt")["pixel_values"][0]
    np.testing.assert_array_equal(denormalize(pixels, processor), np.asarray(image))


@pytest.fixture
def saved(tmp_path):
    model = ViTScratchForImageClassification(ViTScratchConfig(**TINY))
    model.save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_writes_every_picture_of_every_image(saved, tmp_path, photographs, capsys):
    output = tmp_path / "pictures"
    files = [str(tmp_path / "photo.png"), str(tmp_path / "photo.jpg")]
    for image, file in zip(photographs, files, strict=False):
        image.save(file)
    assert vit_scratch.main(["explain", str(saved), *files, "--output_dir", str(output)]) == 0
    printed = capsys.readouterr().out.split()
    names = [f"{image}_{name}" for image in ("1_photo", "2_photo") for name in ("class_attention", "heads", "rollout")]
    assert printed == [str(output / f"{name}.png") for name in (*names, "position_similarity", "patch_filters")]
    for path in printed:
        assert len(np.unique(np.asarray(Image.open(path).convert("L")))) > 20  # something is drawn


@pytest.mark.parametrize(
    "fields",
    [{}, {"problem_type": "multi_label_classification"}, {"num_labels": 1}, {"problem_type": "regression"}],
    ids=str,
)
def test_scores_in_the_picture_are_those_of_the_pipeline(fields, photographs):
    config = ViTScratchConfig(**TINY | fields)
    model = randomize_(ViTScratchForImageClassification(config), 0.5).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True)
    pipe = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    image = photographs[0]

    titles = [axes.get_title() for axes in attention_maps.draw_image(pipe, image)["class_attention"].axes]

    kind, expected = "{label}: {score:.0%}", pipe(image, top_k=5)
    if config.problem_type == "regression":  # numbers keep their order
        kind, expected = "{label}: {score:.4g}", sorted(expected, key=lambda prediction: prediction["label"])
        assert expected != pipe(image, top_k=5) or config.num_labels == 1
    assert [title for title in titles if ":" in title] == [kind.format(**best) for best in expected[:2]]


def test_each_title_belongs_to_its_map_if_scores_are_equal(photographs, monkeypatch):
    config = ViTScratchConfig(**TINY | {"problem_type": "multi_label_classification"})
    model = randomize_(ViTScratchForImageClassification(config), 0.5).eval()
    model.classifier.bias.data = torch.tensor([30.0, 40.0, 50.0, 60.0, 70.0])  # all 100%
    model.config.id2label = dict(reversed(model.config.id2label.items()))  # as a JSON file may have them
    processor = ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True)
    pipe = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    shown = []
    monkeypatch.setattr(
        attention_maps, "class_attention", lambda model, pixels, ids: shown.extend(ids) or torch.ones(len(ids), 4, 3)
    )

    figure = attention_maps.draw_image(pipe, photographs[0])["class_attention"]

    titles = [axes.get_title() for axes in figure.axes if ":" in axes.get_title()]
    assert titles == [f"LABEL_{id}: 100%" for id in shown]
    assert len(titles) == 2


def test_map_is_that_of_the_class_even_if_another_one_has_its_name(photographs):
    model = randomize_(ViTScratchForImageClassification(ViTScratchConfig(**TINY)), 0.5).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True)
    pipe = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    apart = attention_maps.inspect_image(pipe, photographs[0], num_classes=5)
    model.config.id2label = {0: "crane", 1: "crane", 2: "$5_to_$10", 3: "crane", 4: "crane"}

    alike = attention_maps.inspect_image(pipe, photographs[0], num_classes=5)

    assert torch.equal(alike.class_attention, apart.class_attention)
    assert {prediction["label"] for prediction in alike.predictions} == {"crane", "$5_to_$10"}
    attention_maps.draw_image(pipe, photographs[0])["class_attention"].savefig(io.BytesIO())


def test_the_command_names_an_image_that_it_cannot_decode_and_goes_on(saved, tmp_path, photographs, capsys):
    files = [tmp_path / "broken.jpg", tmp_path / "photo.jpg"]
    files[0].write_text("no image")
    photographs[0].save(files[1])

    assert vit_scratch.main(["explain", str(saved), *map(str, files), "--output_dir", str(tmp_path / "out")]) == 1

    assert re.fullmatch(r"vit-scratch explain: .*/broken\.jpg cannot .* \(.*\)\.\n", capsys.readouterr().err)
    assert (tmp_path / "out" / "2_photo_rollout.png").is_file()
