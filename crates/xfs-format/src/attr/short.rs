//! The short form: the attributes of a file in its inode.

use super::{XattrContent, XattrFlags, XfsXattr};
use crate::da::u16_at;
use crate::{Malformed, Structure};

/// Verified attributes in short form, in the order of the disk.
#[derive(Clone, Debug, Default)]
pub struct ShortXattrs<'a> {
    /// The attributes. Their values are all local.
    pub list: Vec<XfsXattr<'a>>,
}

const HEADER: usize = 4;

fn bad(problem: String) -> Malformed {
    Malformed::new(Structure::AttributeBlock, problem)
}

impl<'a> ShortXattrs<'a> {
    /// Proves an attribute fork in short form. `fork` is all the room that the fork has.
    pub fn parse(fork: &'a [u8]) -> Result<Self, Malformed> {
        let total = u16_at(fork, 0).unwrap_or(0);
        let bytes = fork.get(..total).filter(|bytes| bytes.len() >= HEADER);
        let bytes = bytes.ok_or_else(|| bad(format!("{total} bytes in {}", fork.len())))?;
        let count = bytes.get(2).copied().unwrap_or(0);
        let mut rest = bytes.get(HEADER..).unwrap_or(&[]);
        let mut list = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let xattr = take_xattr(&mut rest)?;
            xattr.check()?;
            xattr.hash()?;
            list.push(xattr);
        }
        if !rest.is_empty() {
            return Err(bad(format!("{} bytes are left", rest.len())));
        }
        Ok(Self { list })
    }

    /// The attributes of a fork that [`parse`](Self::parse) has accepted before. Another one may
    /// give wrong attributes, or none.
    pub fn view(fork: &'a [u8]) -> impl Iterator<Item = XfsXattr<'a>> {
        let total = u16_at(fork, 0).unwrap_or(0);
        let mut rest = fork.get(HEADER..total).unwrap_or(&[]);
        std::iter::from_fn(move || take_xattr(&mut rest).ok())
    }

    /// The bytes for the fork. They may be more than it has room for. An error when an attribute
    /// has no short form.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let byte = |number: usize| {
            u8::try_from(number).map_err(|_| bad(format!("{number} does not fit in a byte")))
        };
        let mut bytes = vec![0, 0, byte(self.list.len())?, 0];
        for xattr in &self.list {
            let (XattrContent::Local(value), true) =
                (xattr.value, xattr.flags == xattr.flags.namespace())
            else {
                return Err(bad("an attribute has no short form".to_owned()));
            };
            xattr.check()?;
            bytes.extend([byte(xattr.name.len())?, byte(value.len())?, xattr.flags.bits()]);
            bytes.extend_from_slice(xattr.name);
            bytes.extend_from_slice(value);
        }
        let total = u16::try_from(bytes.len()).map_err(|_| bad("too long".to_owned()))?;
        if let Some(start) = bytes.first_chunk_mut::<2>() {
            *start = total.to_be_bytes();
        }
        Ok(bytes)
    }
}

/// The attribute with which `bytes` begin, which are moved behind it.
fn take_xattr<'a>(bytes: &mut &'a [u8]) -> Result<XfsXattr<'a>, Malformed> {
    let cut = || bad("an attribute leads out of the fork".to_owned());
    let (&[name_len, value_len, flags], rest) = bytes.split_first_chunk::<3>().ok_or_else(cut)?;
    let flags = XattrFlags::parse(flags, XattrFlags::NAMESPACE)?;
    let (name, rest) = rest.split_at_checked(usize::from(name_len)).ok_or_else(cut)?;
    let (value, rest) = rest.split_at_checked(usize::from(value_len)).ok_or_else(cut)?;
    *bytes = rest;
    Ok(XfsXattr { flags, name, value: XattrContent::Local(value) })
}
