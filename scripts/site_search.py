# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""For mkdocs: jieba, by which the search finds Chinese words, is not to print how it loads its dictionary."""

import logging

logging.getLogger("jieba").setLevel(logging.WARNING)
