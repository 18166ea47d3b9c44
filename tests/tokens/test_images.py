"""Pictures as a model's processor gets them."""

from itertools import product

from rlft.data.fields import image_of
from rlft.tokens.images import picture


def test_a_picture_is_upright_whatever_its_camera_noted(tmp_path):
    """All eight orientations of EXIF in four lossless formats, from bytes and from a file."""
    from PIL import Image as pillow

    upright = pillow.frombytes("RGB", (3, 2), bytes(range(0, 180, 10)))
    turned = {
        1: upright, 2: upright.transpose(0), 3: upright.transpose(3), 4: upright.transpose(1),
        5: upright.transpose(5), 6: upright.transpose(2), 7: upright.transpose(6), 8: upright.transpose(4),
    }  # fmt: skip
    for (orientation, stored), form in product(turned.items(), ("PNG", "TIFF", "WEBP", "JPEG")):
        exif = pillow.Exif()
        exif[0x0112] = orientation
        file = tmp_path / f"a.{form.lower()}"
        stored.save(file, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
        for image in (image_of(str(file), "a"), image_of(file.read_bytes(), "a")):
            found = picture(image)
            assert found.size == upright.size, (orientation, form)
            if form != "JPEG":
                assert found.tobytes() == upright.tobytes(), (orientation, form)
