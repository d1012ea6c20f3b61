import sys

from .attention import main

sys.exit(main())
