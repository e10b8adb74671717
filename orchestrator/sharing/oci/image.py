"""Export to an OCI image: its files are a ready root, as ``run --isolated=DIR`` has it.

The entries are placed, in the order of their keys, in an empty root by the layers themselves, so that files which hold
many entries depend on the entries alone. The same entries give the same digest. If the tag has an image of this kind
already, only the difference is uploaded, as one more layer.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import Ability, Note
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.temporaries import temporary_folder
from cachectl.moving.bundle import Reader, artifact_of, in_batches
from cachectl.moving.exporting import ExportedLayer, ExportTotal, export, unseen
from cachectl.sharing.oci.repository import LARGEST_MANIFEST, MANIFEST, Manifest, Reference, Repository, digest_of
from cachectl.sharing.oci.tree import LAYER_TYPE, ForeignLayer, Tree, apply_layer, read_tree, write_layer
from cachectl.sharing.place import BadStore, Missing
from cachectl.switching.run import environment_in

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet

_CONFIG_TYPE: Final = "application/vnd.oci.image.config.v1+json"
#: The label that marks images of this kind, and its value; other labels are ``cachectl.LAYER``.
_MARK: Final = "cachectl.format"
_FORMAT: Final = "isolated-root/1"
#: Tools show the time of an image. A real one would change its digest.
_BEGINNING: Final = "1970-01-01T00:00:00Z"
#: The names of processors in images. Source: https://go.dev/doc/install/source#environment
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}
#: An image gets a new single layer instead of one more than these: some tools stop at 127.
_MOST_LAYERS: Final = 32
#: What a tar adds to a file, in bytes.
_TAR_OVERHEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class ImageExport:
    """A written image: its tag, the URL with its digest, the number of its layers and the bytes uploaded.

    Without an entry nothing is written, and ``pinned`` is ``None``.
    """

    image: str
    pinned: str | None
    image_layers: int
    uploaded: int
    layers: tuple[ExportedLayer, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/image/1", also=("total",))

    @property
    def total(self) -> ExportTotal:
        """Return the sums over all layers."""
        return total(ExportTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether nothing was written, or an entry is not in the image."""
        return self.pinned is None or any(layer.failed for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Image:
    """An image in the registry: its manifest and its configuration."""

    manifest: Mapping[str, Any]
    config: Mapping[str, Any]


def export_image(
    stack: LayerSet, url: str, selection: Selection = ALL, *, layers: Iterable[str] = (), force: bool = False
) -> ImageExport:
    """Write the selected entries of the named layers, or of every clearable layer, as the image ``oci://HOST/NAME:TAG``.

    A tag that leads to anything but such an image is moved only with ``force``. Raises :class:`BadRequest` for it,
    :class:`TransferFailed` if the registry cannot be reached. The result names entries that are not in the image.
    """
    reference = Reference.parse(url)
    if reference.digest is not None:
        raise BadRequest(f"{reference}: a digest cannot be written to; name a tag")
    repository = Repository(reference)
    before = _found(repository, force=force)
    with temporary_folder(stack.environment) as folder:
        exported = export(stack, str(folder / "bundle"), selection, layers=layers)
        if exported.sha256 is None:
            return ImageExport(str(reference), None, 0, 0, exported.layers)
        root = folder / "root"
        root.mkdir()
        failed = _fill(stack, folder / "bundle", root)
        reported = tuple(_with_failures(layer, failed.get(layer.layer, [])) for layer in exported.layers)
        manifest, uploaded = _Upload(stack, repository, root).run(before, _labels(reported))
    return ImageExport(
        str(reference), reference.pinned(manifest.digest), len(manifest.content["layers"]), uploaded, reported
    )


def _with_failures(layer: ExportedLayer, failed: Sequence[Note]) -> ExportedLayer:
    return replace(layer, entries=layer.entries - len(failed), failed=(*layer.failed, *failed))


def _found(repository: Repository, *, force: bool) -> _Image | None:
    """Return the image at the tag. Raises :class:`BadRequest` if something else is there."""
    reference = repository.reference
    try:
        manifest = repository.manifest(reference.tag)
    except Missing:
        return None
    try:
        config = json.loads(repository.blob(manifest.content["config"]["digest"], LARGEST_MANIFEST))
        if config["config"]["Labels"][_MARK] == _FORMAT:
            return _Image(manifest.content, config)
    except (KeyError, TypeError, ValueError, RecursionError, BadStore, Missing):
        pass
    if force:
        return None
    raise BadRequest(f"{reference} exists and is no image of cachectl; name another tag, or replace it with --force")


def _fill(stack: LayerSet, bundle: Path, root: Path) -> dict[str, list[Note]]:
    """Place the entries of a bundle in an empty root; return those that a layer refused, by layer."""
    failed: dict[str, list[Note]] = {}
    with bundle.open("rb") as file:
        reader = Reader(file, bundle.stat().st_size)
        chosen = [stack[name] for name in reader.manifest.portability_keys]
        can = {layer.name: layer.abilities()[Ability.RELOCATE] for layer in chosen}
        movable = [layer for layer in chosen if can[layer.name] is None]
        below = type(stack)(environment_in(stack.environment, movable, root))
        for batch in in_batches(reader.contents(), lambda pair: pair[0].layer, lambda pair: pair[0].bytes):
            name = batch[0][0].layer
            if (reason := can[name]) is not None:
                failed.setdefault(name, []).extend(
                    Note(item.key, f"cannot be in an image: {reason}") for item, _ in batch
                )
                continue
            try:
                done: Sequence[object] = below[name].put_new([artifact_of(item, data) for item, data in batch])
            except FAILURES as error:
                done = [error for _ in batch]
            for (item, _), one in zip(batch, done, strict=True):
                if isinstance(one, FAILURES):
                    failed.setdefault(name, []).append(Note(item.key, reason_of(one)))
    return failed


def _labels(layers: Iterable[ExportedLayer]) -> dict[str, str]:
    """Return the labels: for each layer its portability key, as JSON."""
    keys = {
        f"cachectl.{layer.layer}": json.dumps(layer.portability_key, sort_keys=True)
        for layer in layers
        if layer.entries
    }
    return {_MARK: _FORMAT, **keys}


class _Upload:
    """The upload of one root."""

    def __init__(self, stack: LayerSet, repository: Repository, root: Path) -> None:
        self._environment = stack.environment
        self._repository = repository
        self._root = root
        self._tree = read_tree(root)
        self._uploaded = 0

    def run(self, before: _Image | None, labels: Mapping[str, str]) -> tuple[Manifest, int]:
        """Upload what the registry lacks and move the tag; return the manifest and the bytes uploaded."""
        below = self._below(before)
        layers: list[Mapping[str, Any]] = []
        diff_ids: list[str] = []
        if before is not None and below is not None and self._is_small(below, len(before.manifest["layers"])):
            layers, diff_ids = list(before.manifest["layers"]), list(before.config["rootfs"]["diff_ids"])
        if not layers or below != self._tree:
            with unseen(self._environment) as file:
                written = write_layer(file, self._root, self._tree, below if layers and below is not None else {})
                file.seek(0)
                self._put(written.digest, written.bytes, file)
            layers.append({"mediaType": LAYER_TYPE, "digest": written.digest, "size": written.bytes})
            diff_ids.append(written.diff_id)
        config = _config(diff_ids, labels)
        self._put(digest_of(config), len(config), config)
        content = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": _CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
            "layers": layers,
        }
        return self._repository.put_manifest(self._repository.reference.tag, content), self._uploaded

    def _put(self, digest: str, size: int, data: Any) -> None:  # noqa: ANN401 - bytes or a file
        if self._repository.blob_size(digest) is None:
            self._repository.put_blob(digest, data)
            self._uploaded += size

    def _is_small(self, below: Tree, layers: int) -> bool:
        """Return whether one more layer is better than a new single one: less than half of the bytes."""
        size = {path: self._size(path) for path in self._tree}
        changed = sum(size[path] for path, digest in self._tree.items() if below.get(path) != digest)
        return layers < _MOST_LAYERS and 2 * changed <= sum(size.values())

    def _size(self, path: str) -> int:
        return (self._root / path).stat().st_size if self._tree[path] else 0

    def _below(self, before: _Image | None) -> Tree | None:
        """Return the files of the image at the tag; ``None`` without one, or if cachectl did not write its layers."""
        if before is None:
            return None
        # Every layer together has hardly more than this root, if one more layer is to be small.
        most = 4 * sum(self._size(path) + _TAR_OVERHEAD for path in self._tree)
        tree: Tree = {}
        try:
            for layer in before.manifest["layers"]:
                with unseen(self._environment) as file:
                    self._repository.fetch(layer["digest"], file, most)
                    file.seek(0)
                    apply_layer(file, tree, most)
        except (ForeignLayer, BadStore, Missing, KeyError, TypeError):
            return None
        return tree


def _config(diff_ids: Sequence[str], labels: Mapping[str, str]) -> bytes:
    machine = platform.machine()
    content = {
        "created": _BEGINNING,
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": platform.system().lower(),
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        "history": [{"created": _BEGINNING, "created_by": "cachectl export --image"} for _ in diff_ids],
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
