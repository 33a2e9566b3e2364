"""A convolutional network on Fashion-MNIST, trained beside the same network on torch: ``triplan demo --train``.

    python examples/fashion_mnist.py --data FOLDER --out curves.png

Needs the extra ``cli``, and the data: of the Debian package dataset-fashion-mnist, or in a folder that --data names.
Five epochs reach 91 % of the test images on a GPU; a CPU trains on 1,000 images in two minutes. --twice trains again in
deterministic mode and compares every loss and parameter; --help lists the rest.
"""

import sys

from triplan.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", "--train", *sys.argv[1:]]))
