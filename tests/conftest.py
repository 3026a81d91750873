"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors on a busy machine are five times as fast on one thread; what a test sets is undone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
