//! Intents to change an attribute (`ATTRI`).

use zerocopy::little_endian as le;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ItemHead, XfsItemType};
use crate::attr::{MAX_VALUE, XattrFlags};
use crate::log::{XfsLogVector, XfsRegions, bad_item};
use crate::parent::ParentValue;
use crate::{Ino, Malformed};

/// The longest name.
const NAME_MAX: usize = 255;

/// The first region of an intent to change an attribute.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AttributeFormat {
    head: ItemHead,
    generation: le::U32,
    id: le::U64,
    ino: le::U64,
    op_flags: le::U32,
    /// The length of the name; for the replacement of a parent pointer those of two names.
    name_lens: [le::U16; 2],
    value_len: le::U32,
    filter: le::U32,
}

const _: () = assert!(size_of::<AttributeFormat>() == 40 && align_of::<AttributeFormat>() == 1);

/// A change of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum XfsAttributeOp {
    /// Add it.
    Set = 1,
    /// Remove it.
    Remove = 2,
    /// Give it another value.
    Replace = 3,
    /// Add a parent pointer.
    SetParent = 4,
    /// Remove a parent pointer.
    RemoveParent = 5,
    /// Make one parent pointer another.
    ReplaceParent = 6,
}

/// An attribute to be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsAttributeIntent<'a> {
    /// The id of the intent.
    pub id: u64,
    /// The file.
    pub ino: Ino,
    /// Its generation, for parent pointers.
    pub generation: u32,
    /// What happens to the attribute.
    pub op: XfsAttributeOp,
    /// The namespace, as the flags of an attribute.
    pub filter: u32,
    /// The name.
    pub name: &'a [u8],
    /// The name that a replaced parent pointer gets.
    pub new_name: Option<&'a [u8]>,
    /// The value; for a replaced parent pointer the old one.
    pub value: Option<&'a [u8]>,
    /// The value that a replaced parent pointer gets.
    pub new_value: Option<&'a [u8]>,
}

impl<'a> XfsAttributeIntent<'a> {
    pub(super) fn parse(first: &'a [u8], regions: XfsRegions<'a>) -> Result<Self, Malformed> {
        let Ok(format) = AttributeFormat::ref_from_bytes(first) else {
            return Err(bad_item(format!("a first region of {} bytes", first.len())));
        };
        let op = match format.op_flags.get() {
            1 => XfsAttributeOp::Set,
            2 => XfsAttributeOp::Remove,
            3 => XfsAttributeOp::Replace,
            4 => XfsAttributeOp::SetParent,
            5 => XfsAttributeOp::RemoveParent,
            6 => XfsAttributeOp::ReplaceParent,
            other => return Err(bad_item(format!("change {other:#x} of an attribute"))),
        };
        let [low, high] = format.name_lens.map(|len| usize::from(len.get()));
        let has_two = op == XfsAttributeOp::ReplaceParent;
        let (name_len, new_name_len) = if has_two { (low, high) } else { (high << 16 | low, 0) };
        let value_len = format.value_len.get() as usize;
        let mut at = 0;
        let mut next = |len: usize, most: usize| {
            at += 1;
            let region = regions.get(at).unwrap_or_default();
            let is_padded = region.len() == len.next_multiple_of(4);
            let bytes = region.get(..len).filter(|_| is_padded && len <= most);
            bytes.ok_or_else(|| {
                bad_item(format!("{len} bytes, at most {most}, in {} of a region", region.len()))
            })
        };
        let name = next(name_len, NAME_MAX)?;
        let new_name = if has_two { Some(next(new_name_len, NAME_MAX)?) } else { None };
        let value = if value_len > 0 { Some(next(value_len, MAX_VALUE)?) } else { None };
        let new_value = if has_two { Some(next(value_len, MAX_VALUE)?) } else { None };
        let filter = format.filter.get();
        let flags = u8::try_from(filter).ok().map(XattrFlags::from_bits_retain);
        let known = XattrFlags::NAMESPACE | XattrFlags::INCOMPLETE;
        let is_parent = matches!(
            op,
            XfsAttributeOp::SetParent
                | XfsAttributeOp::RemoveParent
                | XfsAttributeOp::ReplaceParent
        );
        let fits = at + 1 == regions.len()
            && !name.is_empty()
            && new_name.is_none_or(|name| !name.is_empty())
            && flags.is_some_and(|flags| known.contains(flags))
            && (!is_parent
                || value_len == size_of::<ParentValue>()
                    && flags.is_some_and(|flags| flags.contains(XattrFlags::PARENT)))
            && (op != XfsAttributeOp::Remove || value.is_none());
        if !fits {
            return Err(bad_item(format!(
                "{op:?} with a value of {value_len} bytes, namespace {filter:#x}, {} regions",
                regions.len()
            )));
        }
        Ok(Self {
            id: format.id.get(),
            ino: Ino(format.ino.get()),
            generation: format.generation.get(),
            op,
            filter,
            name,
            new_name,
            value,
            new_value,
        })
    }

    pub(super) fn encode(&self, to: &mut XfsLogVector) {
        let short = |name: Option<&[u8]>| {
            let len = u16::try_from(name.map_or(0, <[u8]>::len));
            le::U16::new(len.expect("a name has at most 255 bytes"))
        };
        let value_len = u32::try_from(self.value.map_or(0, <[u8]>::len));
        let rest = [self.new_name, self.value, self.new_value];
        let regions = rest.iter().flatten().fold(2, |count, _| count + 1);
        let format = AttributeFormat {
            head: ItemHead::new(XfsItemType::Attri, regions),
            generation: le::U32::new(self.generation),
            id: le::U64::new(self.id),
            ino: le::U64::new(self.ino.0),
            op_flags: le::U32::new(self.op as u32),
            name_lens: [short(Some(self.name)), short(self.new_name)],
            value_len: le::U32::new(value_len.expect("a value has at most 64 KiB")),
            filter: le::U32::new(self.filter),
        };
        to.push(&[format.as_bytes()]);
        to.push(&[self.name]);
        for region in rest.into_iter().flatten() {
            to.push(&[region]);
        }
    }
}
