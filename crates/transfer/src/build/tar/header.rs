//! The fields of a header.
//!
//! ```text
//! 0     100   108  116  124   136    148      156   157       257    265    297    329  337  345
//! | name | mode | uid | gid | size | mtime | checksum | type | link name | magic | user | group | major | minor | prefix |
//! ```
//!
//! Numbers are octal digits, or from GNU tar on, with the highest bit set, binary and big-endian.
//! In archives of GNU tar other fields are in the place of the prefix.

use super::{BLOCK, SourceProblem};

/// A header.
pub(super) struct Header {
    block: [u8; BLOCK],
}

impl Header {
    pub(super) fn new(block: &[u8; BLOCK]) -> Self {
        Self { block: *block }
    }

    fn field(&self, start: usize, len: usize) -> &[u8] {
        self.block.get(start..start + len).unwrap_or_default()
    }

    /// A field up to its first NUL byte.
    fn text(&self, start: usize, len: usize) -> &[u8] {
        let field = self.field(start, len);
        let end = field.iter().position(|&byte| byte == 0).unwrap_or(len);
        field.get(..end).unwrap_or_default()
    }

    fn number(&self, start: usize, len: usize, what: &str) -> Result<i64, SourceProblem> {
        number(self.field(start, len))
            .ok_or_else(|| SourceProblem::Damaged(format!("its {what} is no number")))
    }

    /// A number that cannot be negative.
    fn count(&self, start: usize, len: usize, what: &str) -> Result<u64, SourceProblem> {
        let number = self.number(start, len, what)?;
        number.try_into().map_err(|_| SourceProblem::Damaged(format!("its {what} is negative")))
    }

    fn id(&self, start: usize, what: &str) -> Result<u32, SourceProblem> {
        let number = self.count(start, 8, what)?;
        let too_large = |_| SourceProblem::Refused(format!("its {what}, {number}, is too large"));
        number.try_into().map_err(too_large)
    }

    /// Whether the header is one. Some programs added the bytes as signed numbers.
    pub(super) fn has_right_checksum(&self) -> bool {
        let Some(stored) = number(self.field(148, 8)) else { return false };
        let with_spaces = |at: usize, byte: u8| if (148..156).contains(&at) { b' ' } else { byte };
        let bytes = || self.block.iter().enumerate().map(|(at, &byte)| with_spaces(at, byte));
        stored == bytes().map(i64::from).sum::<i64>()
            || stored == bytes().map(|byte| i64::from(byte.cast_signed())).sum::<i64>()
    }

    pub(super) fn entry_type(&self) -> u8 {
        self.block.get(156).copied().unwrap_or_default()
    }

    fn is_gnu(&self) -> bool {
        self.field(257, 8) == b"ustar  \0"
    }

    /// The path, as far as it has room here.
    pub(super) fn path(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        if self.field(257, 5) != b"ustar" || self.is_gnu() {
            return name.to_vec();
        }
        // Archives of star have times behind a shorter prefix, and a sign of that at the end.
        let prefix = self.text(345, if self.field(508, 4) == b"tar\0" { 131 } else { 155 });
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    /// The target of a link, as far as it has room here.
    pub(super) fn link(&self) -> Vec<u8> {
        self.text(157, 100).to_vec()
    }

    pub(super) fn permissions(&self) -> Result<u32, SourceProblem> {
        // Some programs store the type of the file, too.
        let mode = self.number(100, 8, "mode")?;
        Ok(u32::try_from(mode & 0o7777).unwrap_or_default())
    }

    pub(super) fn uid(&self) -> Result<u32, SourceProblem> {
        self.id(108, "user")
    }

    pub(super) fn gid(&self) -> Result<u32, SourceProblem> {
        self.id(116, "group")
    }

    /// The length of the data that follows.
    pub(super) fn size(&self) -> Result<u64, SourceProblem> {
        self.count(124, 12, "size")
    }

    pub(super) fn mtime(&self) -> Result<i64, SourceProblem> {
        self.number(136, 12, "time")
    }

    /// The time of the last access in an archive of GNU tar, which may have one.
    pub(super) fn gnu_atime(&self) -> Option<i64> {
        if !self.is_gnu() || self.text(345, 12).is_empty() {
            return None;
        }
        number(self.field(345, 12)).filter(|&secs| secs > 0)
    }

    pub(super) fn dev_major(&self) -> Result<u32, SourceProblem> {
        self.id(329, "device number")
    }

    pub(super) fn dev_minor(&self) -> Result<u32, SourceProblem> {
        self.id(337, "device number")
    }

    /// The length of a sparse file of GNU tar, holes included.
    pub(super) fn real_size(&self) -> Result<u64, SourceProblem> {
        self.count(483, 12, "size")
    }

    /// The first ranges of a sparse file of GNU tar, and whether blocks with more of them follow.
    pub(super) fn gnu_ranges(&self) -> (&[u8], bool) {
        (self.field(386, 96), self.field(482, 1) != [0])
    }
}

/// A number: octal digits, or binary.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        let is_negative = first & 0x40 != 0;
        let start = if is_negative { i128::from(first) - 0x100 } else { i128::from(first & 0x3f) };
        let mut value = start;
        for &byte in rest {
            value = value.checked_mul(256)?.checked_add(i128::from(byte))?;
        }
        return value.try_into().ok();
    }
    let is_end = |byte: &u8| matches!(byte, 0 | b' ');
    let start = field.iter().position(|&byte| byte != b' ').unwrap_or(field.len());
    let digits = field.get(start..)?;
    let end = digits.iter().position(is_end).unwrap_or(digits.len());
    let (digits, after) = digits.split_at(end);
    // Nothing but padding follows.
    if !after.iter().all(is_end) {
        return None;
    }
    let digit = |value: i64, &byte: &u8| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(byte - b'0')),
        _ => None,
    };
    digits.iter().try_fold(0, digit)
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers_of_all_dialects() {
        for (field, expected) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"644     ", Some(0o644)),
            (b"\0\0\0\0", Some(0)),
            (b"77777777", Some(0o7777_7777)),
            (b"\x80\0\0\0\x01\0\0\x02", Some(0x0100_0002)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xfb", Some(-5)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfb", Some(-5)),
            (b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"0000648\0", None),
            (b"64x4   \0", None),
            (b"-1      ", None),
            (b"12 34\0\0\0", None),
        ] {
            assert_eq!(number(field), expected, "{}", field.escape_ascii());
        }
    }
}
