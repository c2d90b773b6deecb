"""timm models as encoders: rows against timm's own forward_features, checkpoints, refusals.

Run: pytest tests/encoders/test_timm_vision.py
"""

import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn

from encoders import ImageTimm, VideoTimm
from encoders.networks.timm_vision import measure, places, stride, unused


def test_rows_hold_the_features_of_their_places():
    config = VideoTimm(model="test_vit", merge=2)
    module = config.build(8).double()
    x = torch.randint(0, 256, (3, 2, 64, 96, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(module.backbone.pretrained_cfg[name], dtype=torch.float64) for name in ("mean", "std"))
    rows = []
    for unit in x:
        frames = [
            module.backbone.forward_features(((f / 255.0).double() - mean).div(std).permute(2, 0, 1)[None])
            for f in unit
        ]
        frames = [features[0, module.backbone.num_prefix_tokens :].reshape(4, 6, -1) for features in frames]
        for row in range(0, 4, 2):
            for column in range(0, 6, 2):
                places = [f[row + a, column + b] for f in frames for a in range(2) for b in range(2)]
                rows.append(module.projector(torch.cat(places)[None, None])[0])
    torch.testing.assert_close(module(x), torch.stack(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoint_of_a_classifier_is_read_without_its_head(tmp_path, suffix):
    source = timm.create_model("test_vit", num_classes=10)
    path = str(tmp_path / f"weights{suffix}")
    save_file(source.state_dict(), path) if suffix == ".safetensors" else torch.save(source.state_dict(), path)
    module = ImageTimm(model="test_vit", checkpoint=path).build(8)
    for name, value in module.backbone.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]), name


def test_checkpoint_that_does_not_fit_is_refused(tmp_path):
    path = str(tmp_path / "other.safetensors")
    save_file(timm.create_model("test_vit2", num_classes=0).state_dict(), path)
    with pytest.raises(ValueError, match=r"other\.safetensors.*does not fit"):
        ImageTimm(model="test_vit", checkpoint=path).build(8)
    with pytest.raises(ValueError, match=r"nowhere\.pth.*not a file"):
        ImageTimm(model="test_vit", checkpoint="nowhere.pth").build(8)


class Hostile:
    def __reduce__(self):
        return (eval, ("1 + 1",))


def test_checkpoint_is_never_unpickled(tmp_path):
    path = tmp_path / "hostile.pth"
    torch.save({"weight": Hostile()}, path)
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
        ImageTimm(model="test_vit", checkpoint=str(path)).build(8)


def test_unknown_model_and_size_are_refused():
    with pytest.raises(ValueError, match=r"no model 'vit_huge_patch7'.*near it"):
        ImageTimm(model="vit_huge_patch7").build(8)
    with pytest.raises(ValueError, match="resize it to 32 x 32"):
        ImageTimm(model="test_vit").grid((33, 32))
    with pytest.raises(ValueError, match=r"does not take pictures of 64 x 64.*use 224 x 224"):
        ImageTimm(model="cait_xxs24_224").grid((64, 64))
    with pytest.raises(ValueError, match=r"gives \(2, 2\) features .* where 4 x 4"):
        ImageTimm(model="inception_v4").grid((128, 128))


def test_batch_norm_does_not_mix_units():
    module = ImageTimm(model="test_resnet", merge=1).build(8).train().double()
    x = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    torch.testing.assert_close(module(x)[:4], module(x[:1]), rtol=1e-10, atol=1e-10)


def test_asking_about_a_model_does_not_change_what_is_drawn_next():
    config = ImageTimm(model="test_vit2")
    torch.manual_seed(0)
    fresh = config.build(8).state_dict()
    for function in (unused, stride, places, measure):
        function.cache_clear()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    config.flops((32, 32), width=8)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, fresh[name]) for name, value in config.build(8).state_dict().items())


@pytest.mark.parametrize(
    ("model", "sides"), [("vit_base_patch16_siglip_224", (64, 96)), ("vit_small_patch14_dinov2", (56, 84))]
)
def test_siglip_and_dinov2_resize_their_positions_as_timm_does(tmp_path, model, sides):
    """The peer is made for this picture size, and timm resamples the position embedding when it loads the file."""
    torch.manual_seed(0)
    path = str(tmp_path / "weights.safetensors")
    save_file(timm.create_model(model, num_classes=0).state_dict(), path)
    peer = timm.create_model(model, num_classes=0, img_size=sides).eval()
    timm.models.load_checkpoint(peer, path, filter_fn=checkpoint_filter_fn)
    config = ImageTimm(model=model, checkpoint=path, merge=2)
    module = config.build(8)
    x = torch.randint(0, 256, (1, *sides, 3), dtype=torch.uint8)
    with torch.no_grad():
        mean, std = (torch.tensor(peer.pretrained_cfg[name]) for name in ("mean", "std"))
        pixels = ((x / 255 - mean) / std).permute(0, 3, 1, 2)
        expected = peer.forward_features(pixels)[:, peer.num_prefix_tokens :]
        patch = stride(model)
        grid = expected.unflatten(1, (sides[0] // patch, sides[1] // patch))
        blocks = grid.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)
        found = module.features(x)
    assert found.shape == blocks.shape == (1, config.num_tokens(sides), 4 * peer.num_features)
    assert (found - blocks).norm() < 1e-5 * blocks.norm()
