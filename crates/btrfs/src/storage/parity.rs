//! RAID5 and RAID6 arithmetic.
//!
//! P is the sum of the data stripes of a row. Q is the sum of each data stripe times 2 to the power
//! of its index. Both sums are in the field of 256 elements with the polynomial x^8 + x^4 + x^3 +
//! x^2 + 1, where adding is XOR (H. P. Anvin, "The mathematics of RAID-6"). A lost stripe is
//! computed from the sums.

/// The low byte of the polynomial.
const POLYNOMIAL: u8 = 0x1d;

/// Powers of 2 in the field, and their logarithms. `LOG[0]` is not used.
const TABLES: ([u8; 255], [u8; 256]) = {
    let (mut exp, mut log) = ([0; 255], [0; 256]);
    let (mut power, mut value) = (0u8, 1u8);
    while power < 255 {
        exp[power as usize] = value;
        log[value as usize] = power;
        value = (value << 1) ^ if value & 0x80 == 0 { 0 } else { POLYNOMIAL };
        power += 1;
    }
    (exp, log)
};

/// 2 to the power of `exponent`.
fn power(exponent: usize) -> u8 {
    TABLES.0[exponent % 255]
}

/// The inverse of `a`, which is not 0.
fn inverse(a: u8) -> u8 {
    power(255 - usize::from(TABLES.1[usize::from(a)]))
}

fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    power(usize::from(TABLES.1[usize::from(a)]) + usize::from(TABLES.1[usize::from(b)]))
}

/// Adds `other` to `sum`.
pub(super) fn add(sum: &mut [u8], other: &[u8]) {
    for (a, b) in sum.iter_mut().zip(other) {
        *a ^= b;
    }
}

/// Adds `other`, which is the data stripe `index`, to the Q sum.
pub(super) fn add_to_q(sum: &mut [u8], other: &[u8], index: usize) {
    add_scaled(sum, other, power(index));
}

fn add_scaled(sum: &mut [u8], other: &[u8], factor: u8) {
    let table = product_table(factor);
    for (a, b) in sum.iter_mut().zip(other) {
        *a ^= table[usize::from(*b)];
    }
}

fn product_table(factor: u8) -> [u8; 256] {
    let mut table = [0; 256];
    for (value, product) in (0u8..=255).zip(&mut table) {
        *product = multiply(value, factor);
    }
    table
}

/// Replaces `q` by data stripe `index`. On entry, `q` is the stored Q plus the Q sum of all other
/// data stripes.
pub(super) fn solve_q(q: &mut [u8], index: usize) {
    let table = product_table(inverse(power(index)));
    for byte in q {
        *byte = table[usize::from(*byte)];
    }
}

/// Replaces `p` by data stripe `x`, when stripe `y` is lost too. On entry, `p` and `q` are the
/// stored P and Q plus the sums of all other data stripes.
///
/// With P = X + Y and Q = 2^x X + 2^y Y: X = (Q + 2^y P) / (2^x + 2^y).
pub(super) fn solve_pq(p: &mut [u8], q: &[u8], x: usize, y: usize) {
    let divisor = inverse(power(x) ^ power(y));
    let from_q = product_table(divisor);
    let from_p = product_table(multiply(divisor, power(y)));
    for (p, q) in p.iter_mut().zip(q) {
        *p = from_q[usize::from(*q)] ^ from_p[usize::from(*p)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_one_and_two_lost_stripes_are_solved_for() {
        let stripes: Vec<Vec<u8>> = (0..16u8)
            .map(|i| (0..=255u8).map(|b| b.wrapping_mul(i ^ 0x5b) ^ i).collect())
            .collect();
        let sums = |without: &[usize]| {
            let (mut p, mut q) = (vec![0; 256], vec![0; 256]);
            for (i, stripe) in stripes.iter().enumerate().filter(|(i, _)| !without.contains(i)) {
                add(&mut p, stripe);
                add_to_q(&mut q, stripe, i);
            }
            (p, q)
        };
        let (stored_p, stored_q) = sums(&[]);
        for x in 0..stripes.len() {
            let (_, mut q) = sums(&[x]);
            add(&mut q, &stored_q);
            solve_q(&mut q, x);
            assert_eq!(q, stripes[x], "stripe {x} from Q");
            for y in (0..stripes.len()).filter(|&y| y != x) {
                let (mut p, mut q) = sums(&[x, y]);
                add(&mut p, &stored_p);
                add(&mut q, &stored_q);
                solve_pq(&mut p, &q, x, y);
                assert_eq!(p, stripes[x], "stripe {x} with {y} lost too");
            }
        }
    }
}
