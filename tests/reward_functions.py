"""Reward functions that several tests share; a worker imports this file, which must be quick."""

import asyncio
import ctypes
import math
import os
import sys
import time


def lengths(completions):
    return [len(completion) for completion in completions]


class Longer:
    def __init__(self, than):
        self.than = than

    def __call__(self, completions):
        return [len(completion) > self.than for completion in completions]

    def method(self, completions):
        return self(completions)


async def slow_lengths(completions):
    await asyncio.sleep(0.01)
    return lengths(completions)


def own_pid(completions):
    return [os.getpid()] * len(completions)


def raising(completions):
    return [{"2": 1.0, "4": 0.5}[completion] for completion in completions]


def hanging(completions):
    while "five" in completions:
        time.sleep(1)
    return lengths(completions)


def computing(completions):
    # In C, where no signal handler and no thread gets a turn.
    return [9**9**9 if completion == "five" else 1 for completion in completions]


def ending(completions):
    if "five" in completions:
        os._exit(3)
    return lengths(completions)


def crashing(completions):
    if "five" in completions:
        ctypes.string_at(0)
    return lengths(completions)


def leaving(completions):
    if "five" in completions:
        sys.exit("bye")
    return lengths(completions)


def infinite(completions):
    return [math.inf if completion == "five" else 1 for completion in completions]


def wordy(completions):
    return ["0.5" if completion == "five" else 1 for completion in completions]
