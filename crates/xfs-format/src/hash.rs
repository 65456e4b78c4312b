//! The hashes of names in directories and attribute trees (book, "Directories"; seen against
//! `xfs_db -c hash`).

use crate::Ino;

/// The hash of the name of a directory entry or an attribute.
#[must_use]
pub fn name_hash(name: &[u8]) -> u32 {
    let (words, rest) = name.as_chunks::<4>();
    let hash = words.iter().fold(0_u32, |hash, &word| {
        let [a, b, c, d] = word.map(u32::from);
        a << 21 ^ b << 14 ^ c << 7 ^ d ^ hash.rotate_left(28)
    });
    match *rest {
        [a, b, c] => u32::from(a) << 14 ^ u32::from(b) << 7 ^ u32::from(c) ^ hash.rotate_left(21),
        [a, b] => u32::from(a) << 7 ^ u32::from(b) ^ hash.rotate_left(14),
        [a] => u32::from(a) ^ hash.rotate_left(7),
        _ => hash,
    }
}

/// The hash of a parent pointer: that of the entry's name, with both halves of the number of the
/// directory.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the halves of the number")]
pub fn parent_hash(parent: Ino, name: &[u8]) -> u32 {
    name_hash(name) ^ (parent.0 >> 32) as u32 ^ parent.0 as u32
}

#[cfg(test)]
mod tests {
    use super::{name_hash, parent_hash};
    use crate::Ino;

    #[test]
    fn hashes_are_those_of_xfs_db() {
        // What `xfs_db -c "hash NAME"` of xfsprogs 6.1 prints.
        let known = [
            (".", 0x2e),
            ("..", 0x172e),
            ("abc", 0x0018_7163),
            ("abcd", 0x0c38_b1e4),
            ("lost+found", 0x021a_a60c),
            ("SGI_ACL_FILE", 0x275b_19c4),
            ("a-much-longer-name-with-29-ch", 0x3ef0_385f),
        ];
        for (name, hash) in known {
            assert_eq!(name_hash(name.as_bytes()), hash, "{name}");
        }
        assert_eq!(parent_hash(Ino(0x1_0000_0080), b"."), 0x2e ^ 0x80 ^ 1);
    }
}
