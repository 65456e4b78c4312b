//! Names whose hashes collide.
//!
//! A directory item is found by the hash of its name: CRC-32C over the name from the start value
//! `0xffff_fffe`, without the closing inversion. Names that collide share one item. A CRC is
//! linear. So four free bytes at the end of a name can give it any hash, and two names of one
//! length that collide for one start value collide for every start value. Extended references of
//! hard links start from the number of the directory, so their hashes collide too.

use crate::random::Random;

/// The hash of a name in a directory or among extended attributes.
#[must_use]
pub fn hash(name: &[u8]) -> u32 {
    // The crate inverts the start value and the result; the format does neither.
    !crc32c::crc32c_append(!0xffff_fffe, name)
}

/// `count` different names, all of `len` bytes, that start with `prefix` and have one hash. They
/// hold neither `/` nor NUL.
#[must_use]
pub fn colliding(prefix: &[u8], len: usize, count: usize) -> Vec<Vec<u8>> {
    let mut random = Random::new(0x00c0_1115_1011);
    let mut names: Vec<Vec<u8>> = Vec::new();
    while names.len() < count {
        let name = with_hash(prefix, len, 0x0dd_ba11, &mut random);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// A name of `len` bytes that starts with `prefix` and has this hash.
#[must_use]
pub fn with_hash(prefix: &[u8], len: usize, target: u32, random: &mut Random) -> Vec<u8> {
    assert!(len >= prefix.len() + 8, "eight bytes are needed beside the prefix");
    let table = forward_table();
    loop {
        let mut name = prefix.to_vec();
        while name.len() < len - 4 {
            name.push(b'a' + u8::try_from(random.below(26)).expect("below 26"));
        }
        let tail = tail_for(&table, hash(&name), target);
        if tail.iter().all(|&byte| byte != b'/' && byte != 0) {
            name.extend_from_slice(&tail);
            debug_assert_eq!(hash(&name), target);
            return name;
        }
    }
}

/// The table of the byte-wise algorithm for the reflected polynomial of CRC-32C.
fn forward_table() -> [u32; 256] {
    let mut table = [0; 256];
    for (index, entry) in (0u32..).zip(&mut table) {
        *entry = (0..8).fold(index, |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()));
    }
    table
}

/// The four bytes that take the CRC register from `from` to `to`.
fn tail_for(table: &[u32; 256], from: u32, to: u32) -> [u8; 4] {
    // Backwards: the high byte of a register tells which table entry made it.
    let mut entries = [0; 4];
    let mut register = to;
    for entry in entries.iter_mut().rev() {
        *entry = (0..256).find(|&i| table[i] >> 24 == register >> 24).expect("a permutation");
        register = (register ^ table[*entry]) << 8;
    }
    // Forwards: the byte that selects that entry, given the register at this point.
    let mut register = from;
    entries.map(|entry| {
        let index = u8::try_from(entry).expect("an index of 256 entries");
        let byte = index ^ u8::try_from(register & 0xff).expect("one byte");
        register = (register >> 8) ^ table[entry];
        byte
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_collide_and_differ() {
        let names = colliding(b"x-", 40, 9);
        for name in &names {
            assert_eq!(hash(name), hash(&names[0]));
            assert_eq!(name.len(), 40);
            assert!(name.starts_with(b"x-"));
        }
        let distinct: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), 9);
    }

    /// The hash that the kernel gave to these names in a volume it made.
    #[test]
    fn the_hash_is_the_one_of_the_format() {
        assert_eq!(hash(b"default"), 2_378_154_706);
    }
}
