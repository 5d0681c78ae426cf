"""The alarm, by hand."""

import logging

import pytest

from grpo_lightning.plugins.learned.hacking import HackingAlarm


def iteration(alarm: HackingAlarm, reward: float, label: float) -> bool:
    # 50 at reward ± 0.1: a standard error of 0.1 / sqrt(100) = 0.01.
    alarm.add([reward - 0.1] * 50, [label] * 50)
    alarm.add([reward + 0.1] * 50, [label] * 50)
    return alarm.end_iteration("judge")


def test_it_rings_while_the_reward_rises_and_the_label_does_not(caplog: pytest.LogCaptureFixture):
    alarm = HackingAlarm(patience=2)
    numbers = [(0.5, 0.4), (0.5, 0.5), (0.6, 0.4), (0.7, 0.5), (0.8, 0.3), (0.81, 0.6), (0.9, 0.2)]
    with caplog.at_level(logging.WARNING):
        rings = [iteration(alarm, *pair) for pair in numbers]
    # Against two before: (0.6, 0.4) over (0.5, 0.4) rings; (0.81, 0.6) does not, its label rose.
    assert rings == [False, False, True, True, True, False, True]
    assert len(caplog.messages) == 2, "once an episode"
    assert "judge rose from 0.500 to 0.600 over 2 iterations" in caplog.messages[0] and "0.400 to 0.400" in caplog.text


def test_a_rise_within_the_noise_is_none():
    alarm = HackingAlarm(patience=1)
    iteration(alarm, 0.5, 0.4)
    # Two standard errors of the difference: 2 * sqrt(2) * 0.01 = 0.028.
    assert not iteration(alarm, 0.527, 0.4)
    assert iteration(alarm, 0.527 + 0.03, 0.4)
