//! Contents of files of many sizes, for any way to store them.

use std::path::Path;

use super::write;
use crate::random::Random;

/// Sizes in bytes around every limit that changes how data is stored: nothing, inline data, a
/// sector, a compressed extent, several extents.
const SIZES: [usize; 19] = [
    0, 1, 2, 100, 2047, 2048, 2049, 4000, 4095, 4096, 4097, 8191, 65_537, 131_071, 131_072,
    131_073, 262_149, 524_288, 1_048_577,
];

/// Sizes in bytes at which incompressible data is stored in another way.
const INCOMPRESSIBLE_SIZES: [usize; 6] = [1, 2048, 4097, 131_072, 131_073, 300_001];

/// Makes the files in `dir`.
pub fn files(dir: &Path) {
    let mut random = Random::new(0xda7a);
    for size in SIZES {
        write(&dir.join(format!("text-{size}")), &random.text(size));
    }
    for size in INCOMPRESSIBLE_SIZES {
        write(&dir.join(format!("random-{size}")), &random.bytes(size));
    }
    write(&dir.join("zeros"), &vec![0; 700_001]);
    // Neighbouring extents, some of which compress.
    let mut mixed = Vec::new();
    for part in 0..6 {
        let len = 60_000 + part * 7000;
        mixed.extend(if part % 2 == 0 { random.text(len) } else { random.bytes(len) });
    }
    write(&dir.join("mixed"), &mixed);
    // Long runs with small differences make every kind of match in an LZ stream.
    let mut runs = Vec::new();
    while runs.len() < 200_000 {
        let byte = u8::try_from(random.below(256)).expect("below 256");
        let len = random.below(900);
        runs.extend((0..len).map(|_| byte));
        let again = usize::try_from(random.below(1 + runs.len() as u64)).expect("an index");
        let piece: Vec<u8> = runs[again..].iter().take(300).copied().collect();
        runs.extend(piece);
    }
    write(&dir.join("runs"), &runs);
}
