"""Quantiles of Student's distribution, held against tables."""

import math

import numpy as np
import pytest

from evalsets.student import student_quantile

# scipy 1.17.1, stats.t.isf
TAILS = (0.2, 0.025, 8.333333333333333e-5, 1e-8, 1e-12)
QUANTILES = {
    1: (1.3763819204711736, 12.706204736174705, 3819.718546939026, 31830988.61837906, 318309886183.7907),
    2: (1.060660171779821, 4.302652729749464, 77.44998412956674, 7071.067705799458, 707106.7811854869),
    3: (0.9784723123633038, 3.1824463052837086, 23.601563788808278, 479.5250695797382, 10331.108244292487),
    4: (0.9409645772351811, 2.7764451051977943, 13.653122408957785, 131.59473694062356, 1316.0727465592565),
    5: (0.9195437802408267, 2.5705818356363155, 10.053012839620113, 62.4045061109673, 393.95695957760375),
    7: (0.8960296443137649, 2.3646242515927844, 7.272458852079211, 27.802283188119887, 104.02182926264722),
    10: (0.8790578285505889, 2.2281388519862753, 5.827267022762699, 15.895687652513546, 40.5320961786626),
    15: (0.8662449731949516, 2.131449545559776, 4.973668188441579, 10.714732022790736, 20.638607310216088),
    20: (0.8599644397323866, 2.0859634472658652, 4.616901378567894, 8.942883259935037, 15.15114959210309),
    22: (0.8582660516582044, 2.0738730679040254, 4.526646880919673, 8.530616477049122, 13.982948301327356),
    39: (0.8509350199201243, 2.022690920036761, 4.165030777282085, 7.021869598116248, 10.087196511192301),
    1000: (0.8419808221624284, 1.9623390808264085, 3.7791539394519704, 5.657912337679105, 7.124228925314409),
}


@pytest.mark.parametrize("column", range(len(TAILS)))
def test_student_quantiles_are_those_of_the_tables(column):
    df = np.array([[*QUANTILES], [*reversed(QUANTILES)]])
    expected = [[row[column] for row in QUANTILES.values()], [row[column] for row in reversed(QUANTILES.values())]]
    np.testing.assert_allclose(student_quantile(TAILS[column], df), expected, rtol=1e-11)


def test_student_quantiles_at_the_ends():
    assert student_quantile(0.0, 5) == math.inf and student_quantile(0.5, 5) == pytest.approx(0, abs=1e-15)
    assert np.isnan(student_quantile(0.1, np.array([0, -1]))).all()
    assert student_quantile(1e-30, 22) > student_quantile(1e-20, 22) > 20
    assert student_quantile(0.025, 1_000_000) == pytest.approx(
        1.9599663568, rel=1e-9
    )  # of the normal distribution, nearly
    for tail in (-1e-9, 0.51, math.nan):
        with pytest.raises(ValueError, match="expected 0 to 0.5"):
            student_quantile(tail, 5)
