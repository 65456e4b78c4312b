//! Reproducible bytes.
//!
//! One small generator (SplitMix64), so that the seed that a failing test prints makes the same
//! bytes on every machine and with every version of every crate.

use std::time::UNIX_EPOCH;

/// The seed of this run: the one in `OFFSHOOT_SEED`, or else a new one. It is printed.
///
/// # Panics
/// When `OFFSHOOT_SEED` is no number.
#[must_use]
pub fn seed_of_run() -> u64 {
    let given = std::env::var("OFFSHOOT_SEED").ok();
    let seed = given.map_or_else(
        || UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos())),
        |seed| seed.parse().expect("OFFSHOOT_SEED is a number"),
    );
    eprintln!("OFFSHOOT_SEED={seed}");
    seed
}

/// The seed in `OFFSHOOT_SEED`, or else `fixed`: for tests in which other seeds may show faults
/// that are known and not mended yet.
#[must_use]
pub fn seed_or(fixed: u64) -> u64 {
    if std::env::var_os("OFFSHOOT_SEED").is_some() { seed_of_run() } else { fixed }
}

/// Whether this run takes a case of a matrix whose cases differ little from each other. A run takes
/// about half of them, others in each run, so that the next ones make up for it. It takes all with
/// `OFFSHOOT_ALL=1`, and when `OFFSHOOT_SEED` repeats a run.
#[must_use]
pub fn is_in_run(case: &str) -> bool {
    if ["OFFSHOOT_ALL", "OFFSHOOT_SEED"].iter().any(|name| std::env::var_os(name).is_some()) {
        return true;
    }
    let of_case = case.bytes().fold(0, |sum: u64, byte| sum.wrapping_mul(31) + u64::from(byte));
    let of_run = UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos()));
    let is_taken = Random::new(of_run ^ of_case).below(2) == 0;
    if !is_taken {
        eprintln!("{case} is left to other runs; OFFSHOOT_ALL=1 takes it");
    }
    is_taken
}

/// A generator of numbers that depend only on its seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator that starts at `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// `len` bytes that no compression makes smaller.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.number().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// `len` bytes of words and lines that compress about as well as source text.
    pub fn text(&mut self, len: usize) -> Vec<u8> {
        const WORDS: [&str; 16] = [
            "extent",
            "chunk",
            "leaf",
            "node",
            "root",
            "tree",
            "generation",
            "stripe",
            "mirror",
            "of",
            "the",
            "a",
            "is",
            "inode",
            "subvolume",
            "checksum",
        ];
        let mut bytes = Vec::with_capacity(len + 32);
        while bytes.len() < len {
            let number = self.number();
            bytes.extend_from_slice(WORDS[(number % 16) as usize].as_bytes());
            match (number >> 8) % 12 {
                0 => bytes.extend_from_slice(format!(" {}\n", number >> 40).as_bytes()),
                1 => bytes.extend_from_slice(b".\n"),
                _ => bytes.push(b' '),
            }
        }
        bytes.truncate(len);
        bytes
    }
}
