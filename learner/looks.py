"""Looks: how sure one look at the evidence must be, where a look is taken every few seconds and one false success is enough.

The error that matters: for one incumbent, that any of the drafts it is compared with is taken for better while none is. Each
look has a new candidate and almost the requests of the look before, so looks depend on one another in a way nobody knows.
Alpha spending holds whatever the dependence is: look j may err with probability a_j, and the sum of a_j bounds them all
(Bonferroni over looks; Lan & DeMets, Biometrika 70, 1983, for one hypothesis looked at repeatedly; Foster & Stine, JRSS B 70,
2008, and Tian & Ramdas, Stat. Methods Med. Res. 30, 2021, for a stream of hypotheses).

Half of alpha goes to the first looks, 1 / (j (j + 1)), for a weak draft should be replaced soon; half is spread evenly over
the looks of an hour, so that the sureness asked for does not grow for ever and a gain after a long standstill is seen:

    a_j = alpha / 2 * (1 / (j (j + 1)) + 1 / looks in an hour)

So the error is at most alpha in an incumbent's first hour, and alpha / 2 in each later one.

Not used: betting on requests one by one (e-values, confidence sequences of bounded differences; mixture SPRT). They use each
request once, after the candidate it judges exists, while a new candidate here is judged on all requests of the window at once:
with differences of 0.15 AL where up to 3 are possible, a gain of 0.1 AL would take them some 90 requests.
"""

from __future__ import annotations

from learner.config import GateSettings

_HOUR_S = 3600.0


def level_of_look(look: int, settings: GateSettings) -> float:
    """Probability with which look number `look` (from 1) at one incumbent may take a draft for better that is not."""
    looks_an_hour = max(_HOUR_S / settings.every_s, 1.0)
    return (1.0 - settings.confidence) / 2 * (1.0 / (look * (look + 1)) + 1.0 / looks_an_hour)
