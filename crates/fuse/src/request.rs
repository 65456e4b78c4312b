//! Requests, decoded with every bound checked.
//!
//! The kernel is trusted, but this decoder may have a fault, and a transport may lose bytes. So it
//! checks everything. A request is [`MalformedRequest`], and answered with `EINVAL`, if it is
//! shorter than its opcode needs, if it has a name without a NUL, or if a length in it does not
//! match the bytes that follow.

use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::wire::{InHeader, opcode};

/// Bytes that are not a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MalformedRequest;

/// The longest text in a request, in bytes: the target of a symbolic link, as long as system calls
/// take.
const TEXT_MAX: usize = 4096;

/// A request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// The opcode, the node and the user.
    pub(crate) header: InHeader,
    /// The rest of the request.
    pub(crate) arguments: RequestArguments<'a>,
}

impl<'a> Request<'a> {
    /// Decodes the request in `bytes`, the result of one read.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, MalformedRequest> {
        let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| MalformedRequest)?;
        if usize::try_from(header.len) != Ok(bytes.len()) || rest.len() < extension_bytes(header) {
            return Err(MalformedRequest);
        }
        Ok(Self::behind(header, bytes))
    }

    /// The request in `bytes`, of which `header` was decoded before.
    pub(crate) fn behind(header: InHeader, bytes: &'a [u8]) -> Self {
        let rest = &bytes[size_of::<InHeader>()..bytes.len() - extension_bytes(header)];
        Self { header, arguments: RequestArguments { fixed: &[], rest } }
    }

    /// Decodes a request in parts: its header at the start of `head`, its fixed part at the start
    /// of `fixed`, the rest in `payload`.
    pub(crate) fn of_parts(
        head: &[u8],
        fixed: &'a [u8],
        payload: &'a [u8],
    ) -> Result<Self, MalformedRequest> {
        let (header, _) = InHeader::read_from_prefix(head).map_err(|_| MalformedRequest)?;
        let behind = size_of::<InHeader>() + payload.len();
        let len = usize::try_from(header.len).map_err(|_| MalformedRequest)?;
        let fixed =
            len.checked_sub(behind).and_then(|len| fixed.get(..len)).ok_or(MalformedRequest)?;
        let end = payload.len().checked_sub(extension_bytes(header)).ok_or(MalformedRequest)?;
        Ok(Self { header, arguments: RequestArguments { fixed, rest: &payload[..end] } })
    }
}

/// The bytes of the extensions at the end of a request. `total_extlen` counts units of 8 bytes.
fn extension_bytes(header: InHeader) -> usize {
    usize::from(header.total_extlen) * 8
}

/// The part of a request that is not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestArguments<'a> {
    /// The fixed part, if it lies apart from `rest`.
    fixed: &'a [u8],
    rest: &'a [u8],
}

impl<'a> RequestArguments<'a> {
    /// Takes the next structure.
    pub(crate) fn take<T: FromBytes + Immutable + KnownLayout>(
        &mut self,
    ) -> Result<T, MalformedRequest> {
        let from = if self.fixed.is_empty() { &mut self.rest } else { &mut self.fixed };
        let (value, rest) = T::read_from_prefix(from).map_err(|_| MalformedRequest)?;
        *from = rest;
        Ok(value)
    }

    /// Takes the next text, and the NUL behind it, which it leaves out of the result.
    pub(crate) fn text(&mut self) -> Result<&'a [u8], MalformedRequest> {
        let within = &self.rest[..self.rest.len().min(TEXT_MAX + 1)];
        let end = within.iter().position(|&byte| byte == 0).ok_or(MalformedRequest)?;
        let text = &self.rest[..end];
        self.rest = &self.rest[end + 1..];
        Ok(text)
    }

    /// Whether the next text is `.` (`false`) or `..` (`true`).
    pub(crate) fn dots(&self) -> Option<bool> {
        match self.rest {
            [b'.', 0, ..] => Some(false),
            [b'.', b'.', 0, ..] => Some(true),
            _ => None,
        }
    }

    /// Takes the name of a directory entry. It may be longer than names of files can be.
    pub(crate) fn name(&mut self) -> Result<&'a [u8], MalformedRequest> {
        let name = self.text()?;
        let is_special = matches!(name, b"" | b"." | b"..") || name.contains(&b'/');
        if is_special { Err(MalformedRequest) } else { Ok(name) }
    }

    /// Takes the next `len` bytes.
    pub(crate) fn data(&mut self, len: u32) -> Result<&'a [u8], MalformedRequest> {
        let len = usize::try_from(len).map_err(|_| MalformedRequest)?;
        let (data, rest) = self.rest.split_at_checked(len).ok_or(MalformedRequest)?;
        self.rest = rest;
        Ok(data)
    }

    /// Whether nothing is left.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.fixed.is_empty() && self.rest.is_empty()
    }
}

/// Whether requests with this opcode get no answer.
pub(crate) fn is_silent(op: u32) -> bool {
    matches!(op, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{SetattrIn, WriteIn};

    /// A request with this body. Its header says `len` instead of the true length.
    fn request(op: u32, body: &[u8], len: Option<u32>, extensions: u16) -> Vec<u8> {
        let len = len.unwrap_or(u32::try_from(40 + body.len()).expect("short"));
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(op.to_ne_bytes());
        bytes.extend(7_u64.to_ne_bytes());
        bytes.extend(1_u64.to_ne_bytes());
        bytes.extend([0; 12]);
        bytes.extend(extensions.to_ne_bytes());
        bytes.extend([0; 2]);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn a_request_is_taken_apart() {
        let body = [&[1; 40][..], b"data"].concat();
        let bytes = request(opcode::WRITE, &body, None, 0);
        let Request { header, mut arguments } = Request::decode(&bytes).expect("well-formed");
        assert_eq!((header.opcode, header.unique, header.nodeid), (opcode::WRITE, 7, 1));
        let write: WriteIn = arguments.take().expect("it is all there");
        assert_eq!(write.size, 0x0101_0101);
        assert_eq!(arguments.data(4), Ok(&b"data"[..]));
        assert!(arguments.is_empty());
    }

    /// Cuts a request at every length: only the whole one decodes.
    #[test]
    fn what_is_short_is_refused() {
        let whole = request(opcode::SETATTR, &[0; 88], None, 0);
        for len in 0..whole.len() {
            assert!(Request::decode(&whole[..len]).is_err(), "{len} bytes");
            // With the short length in its header it decodes, but its fixed part is cut off.
            let mut short = whole[..len.max(40)].to_vec();
            short[..4].copy_from_slice(&u32::try_from(len.max(40)).expect("short").to_ne_bytes());
            let mut arguments = Request::decode(&short).expect("a header").arguments;
            assert!(arguments.take::<SetattrIn>().is_err(), "{len} bytes");
        }
        let longer = [&whole[..], &[0]].concat();
        assert!(Request::decode(&longer).is_err());
        assert!(Request::decode(&request(opcode::LOOKUP, b"a\0", Some(u32::MAX), 0)).is_err());
        assert!(Request::decode(&request(opcode::LOOKUP, b"a\0", Some(0), 0)).is_err());
    }

    /// A request in parts decodes like one in one piece, and a short one is refused.
    #[test]
    fn parts_make_a_request() {
        let body = [&[1; 40][..], b"data", &[0; 8]].concat();
        let bytes = request(opcode::WRITE, &body, None, 1);
        let (head, rest) = bytes.split_at(40);
        let (mut in_out, mut op_in) = ([0; 128], [9; 128]);
        in_out[..40].copy_from_slice(head);
        op_in[..40].copy_from_slice(&rest[..40]);
        let decoded = Request::of_parts(&in_out, &op_in, &rest[40..]).expect("well-formed");
        let (header, mut arguments) = (decoded.header, decoded.arguments);
        assert_eq!((header.opcode, header.unique, header.nodeid), (opcode::WRITE, 7, 1));
        assert_eq!(arguments.take::<WriteIn>().expect("all").size, 0x0101_0101);
        assert_eq!(arguments.data(4), Ok(&b"data"[..]));
        assert!(arguments.is_empty());
        assert!(Request::of_parts(&in_out, &op_in, &rest[40..44]).is_err(), "no extension");
        assert!(Request::of_parts(&in_out, &op_in, &[0; 1000]).is_err(), "longer than it says");
        in_out[..4].copy_from_slice(&1000_u32.to_ne_bytes());
        assert!(Request::of_parts(&in_out, &op_in, &rest[40..]).is_err(), "a long fixed part");
        assert!(Request::of_parts(&in_out[..39], &op_in, &rest[40..]).is_err());
    }

    #[test]
    fn extensions_are_not_arguments() {
        let bytes = request(opcode::LOOKUP, b"name\0...........", None, 1);
        let mut arguments = Request::decode(&bytes).expect("well-formed").arguments;
        assert_eq!(arguments.name(), Ok(&b"name"[..]));
        assert_eq!(arguments.data(3), Ok(&b"..."[..]));
        assert!(arguments.is_empty());
        assert!(Request::decode(&request(opcode::LOOKUP, b"a\0", None, 1)).is_err());
        assert!(Request::decode(&request(opcode::LOOKUP, b"a\0", None, u16::MAX)).is_err());
    }

    #[test]
    fn names_end_and_are_names() {
        let name = |body: &[u8]| {
            let bytes = request(opcode::LOOKUP, body, None, 0);
            Request::decode(&bytes).expect("well-formed").arguments.name().map(<[u8]>::to_vec)
        };
        assert_eq!(name(b"a b\xff\n\0"), Ok(b"a b\xff\n".to_vec()));
        assert_eq!(name(&[&[b'n'; 256][..], &[0]].concat()).map(|name| name.len()), Ok(256));
        let long = [&[b'n'; 5000][..], &[0]].concat();
        for bad in [&b""[..], b"\0", b"a", b".\0", b"..\0", b"a/b\0", &long] {
            assert_eq!(name(bad), Err(MalformedRequest), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn dots_are_told_from_names() {
        let dots = |body: &[u8]| {
            let bytes = request(opcode::LOOKUP, body, None, 0);
            Request::decode(&bytes).expect("well-formed").arguments.dots()
        };
        assert_eq!([dots(b".\0"), dots(b"..\0")], [Some(false), Some(true)]);
        for name in [&b"."[..], b"..", b"...\0", b".a\0", b"\0", b""] {
            assert_eq!(dots(name), None, "{}", name.escape_ascii());
        }
    }

    #[test]
    fn lengths_may_lie() {
        let bytes = request(opcode::WRITE, b"12345678", None, 0);
        let arguments = Request::decode(&bytes).expect("well-formed").arguments;
        for len in [9, 1 << 20, u32::MAX] {
            assert_eq!(arguments.clone().data(len), Err(MalformedRequest));
        }
    }
}
