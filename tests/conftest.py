"""Shared by all tests: asserts in tests/fakes explain themselves as those in test files do."""

import pytest

pytest.register_assert_rewrite("fakes")
